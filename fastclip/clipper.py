"""The stateful step: measure, decide, clip, step."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import accelerated, folding, passes, stepping, watching
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed, Parameters
from fastclip.listing import Listing, require_distinct
from fastclip.memory import Counters, Remembered
from fastclip.overlap import Overlap
from fastclip.policy import SHOWN, Policy
from fastclip.ranks import told
from fastclip.rules import MaxNorm, Rule
from fastclip.scaling import WithoutScaler, optimizers_of, scale_of
from fastclip.stats import GradStats
from fastclip.step import Step, settings_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastclip.distributed.groups import Groups

VERSION = 1  # of the format of `state_dict`
KEYS = ("version", "counters", "rule", "state")


class GradClipper:
    """Clip gradients, and take the optimizer's step or skip it.

    >>> clipper = fastclip.GradClipper(model, max_norm=1.0)
    >>> for inputs, targets in batches:
    ...     loss_fn(model(inputs), targets).backward()
    ...     stats = clipper.step(optimizer)  # instead of optimizer.step()
    ...     optimizer.zero_grad()

    One read of the gradients gives their norm, and `GradStats` of each. A step with NaN or infinite
    gradients is not taken. With a fused optimizer of torch (``fused=True``) and one coefficient for
    all gradients, the optimizer applies it and skips by itself: the gradients are not written
    apart and the host never waits for the device. Buffers that the forward pass updates (the
    running statistics of BatchNorm) have taken the bad batch in already.

    With a ``torch.amp.GradScaler`` the loss scale is taken out in the same read and write:

    >>> scaler.scale(loss).backward()
    >>> stats = clipper.step(optimizer, scaler=scaler)  # instead of unscale_ and scaler.step
    >>> scaler.update()

    Args:
        parameters: a Tensor, an iterable of Tensors or of ``(name, Tensor)`` pairs, or an
            ``nn.Module``. A module is read again at every step, an iterable is listed once.
        max_norm: the threshold for the norm of all gradients: a number of at least 0, a one-element
            Tensor, or a function from the number of steps so far to a number. 1 if neither it nor
            `rule` is given.
        rule: another rule of `fastclip.rules` (or one's own) instead of a fixed threshold.
        norm_type: the order p of the norm, any number or ``"inf"``.
        nonfinite: what to do when an element is NaN or infinite:

            - ``"skip"``: leave the gradients alone, and do not step;
            - ``"zero"``: set those elements to 0, then clip and step. Where processes hold copies
              of a gradient that are not finite on some of them only, the step is skipped
              (`skipped`, and a `found_inf` of 1): the others cannot know which elements to zero;
            - ``"error"``: raise `RuntimeError` naming the parameters, before anything is written;
              this waits for the device at every step;
            - ``"propagate"``: clip and step all the same, as torch does.
        process_group: a ``torch.distributed`` group, or several that are applied in turn, over
            whose ranks a model is split by hand: pipeline stages, hand-made tensor or expert
            parallelism. Each rank passes what it holds, which may be nothing, under the names of
            the whole model; of one name, ranks hold shards. All get the same statistics, with a row
            for every name, and take the same decisions. To build the clipper and each `clip_`,
            `step` and `measure` are collectives of all ranks. The names are exchanged when it is
            built: for parameters that are added or unfrozen later build a new one. DTensors are
            combined over their own meshes first; for those alone, and for DDP, leave it out.
        counts: with `process_group`, a function from name and parameter to whether this rank's copy
            counts in the norm, asked once: false for copies of what another rank counts (a tied
            embedding in the last stage, layer norms beside tensor-parallel matrices). Copies are
            rescaled as what counts, and a NaN in them is seen by all ranks.
        overlap: measure large gradients during backward, by hooks (see `fastclip.overlap`). What
            hooks cannot vouch for is measured by the step as ever; `overlap`, None without, says
            how much that was. Pass a scaler to `clip_` or `step` rather than call ``unscale_``.
            Not noticed are writes after backward that leave a tensor's version as it was (by
            ``.data``, numpy, DLPack or a kernel of one's own) and touch a few elements only.

    Raises:
        TypeError: both `max_norm` and `rule` are given, or something is of a wrong type; or the
            rule is AGC, with a `process_group`.
        ValueError: `max_norm` is negative or NaN, or `norm_type` or `nonfinite` is unknown. With a
            `process_group`: parameters have no names, or the ranks' options differ, or no rank
            counts a parameter.
        RuntimeError: another rank of the `process_group` raised, or died.
    """

    def __init__(
        self,
        parameters: Parameters,
        max_norm: float | Tensor | Callable[[int], float] | None = None,
        *,
        rule: Rule | None = None,
        norm_type: float | str = 2.0,
        nonfinite: Policy = "skip",
        process_group: "ProcessGroup | Sequence[ProcessGroup] | None" = None,
        counts: Callable[[str, Tensor], bool] | None = None,
        overlap: bool = False,
    ) -> None:
        with told(process_group):
            self._listing = Listing(parameters)
            self._settings = settings_of(max_norm, rule, norm_type, nonfinite)
        self._groups = self._met(process_group, counts)
        chosen = self._settings.rule
        if chosen.per_tensor and chosen.init(0, torch.device("cpu")):
            require_distinct(self._names())
        self._counters = Counters()
        self._remembered = Remembered(chosen)
        self._loaded = 0  # `Remembered.checksum` until the step after a load
        self._warned = False  # of an optimizer with other parameters
        self.overlap = Overlap(self._settings.p) if overlap else None
        if self.overlap is not None:
            self.overlap.watch(self._listing.read()[0])

    def clip_(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
    ) -> GradStats:
        """Measure the gradients and rescale them in place.

        Gradients that are not finite stay as they are under ``nonfinite="skip"``, and nothing keeps
        an optimizer from stepping with them: step it yourself only ``if not stats.skipped``, which
        waits for the device, or call `step`, which takes several optimizers too.

        With a `scaler`, the loss scale of all gradients of `optimizer` (one, or several whose
        gradients have one global norm) is taken out as ``scaler.unscale_`` does; then call
        ``scaler.step`` of each and ``scaler.update``. Gradients that the user or another `clip_`
        has unscaled already are just clipped. Without a scaler, `optimizer` changes nothing; but of
        one that accelerate has prepared, this only measures while gradients accumulate, as `step`
        does.

        Raises:
            TypeError: a `scaler` without `optimizer`, or a gradient is of an unsupported type.
            RuntimeError: ``nonfinite="error"`` found a NaN or an infinity; the scaler's calls come
                in a wrong order, or gradients were written since another `clip_` with it, before
                ``scaler.update``; a gradient's elements share memory; or another rank could not
                measure its gradients, or died.
            ValueError: an enabled scaler with ``nonfinite="zero"``; a gradient of none of the
                optimizers given with a scaler; or a schedule gave a negative or NaN threshold.
        """
        if torch.compiler.is_compiling():
            from fastclip import uncompiled

            return uncompiled.call(self.clip_, optimizer, scaler)
        if accelerated.among(optimizer):
            return accelerated.clip_(self, optimizer, scaler)
        with self._attended() as listed:
            loss_scale = scale_of(optimizer, scaler, self._settings.policy)
            stats, _ = self._advance(listed, loss_scale, ())
        loss_scale.note_clipped()
        for each in loss_scale.optimizers:  # of the scaler's steps to come
            folding.ready_to_skip(each)
        return stats

    def step(
        self, optimizer: Optimizer | Sequence[Optimizer], scaler: GradScaler | None = None
    ) -> GradStats:
        """Clip the gradients and take the optimizer's step, or skip it.

        Replaces ``optimizer.step()``, or with a `scaler` ``scaler.step(optimizer)``; the call of
        ``scaler.update()`` stays. Of several optimizers all gradients have one norm and one
        coefficient, and all step or none does. A `UserWarning`, once, says that an optimizer has
        not one of the clipper's parameters; what else the two do not share is no error: parameters
        outside the clipper are not clipped. Hooks of a fused optimizer see the gradients as they
        were before the clip, which the optimizer itself applies.

        Of an optimizer that accelerate has prepared, the scaler is accelerate's, which updates it
        too; and while gradients accumulate, this only measures, and nothing is counted.

        Errors as in `clip_`; and a `TypeError` for an optimizer whose step needs a closure, as that
        of LBFGS: call `clip_` inside the closure.
        """
        if torch.compiler.is_compiling():
            from fastclip import uncompiled

            return uncompiled.call(self.step, optimizer, scaler)
        if accelerated.among(optimizer):
            return accelerated.step(self, optimizer, scaler)
        with self._attended() as listed:
            optimizers = optimizers_of(optimizer)
            for each in optimizers:
                stepping.refuse_closure(each)
            loss_scale = scale_of(optimizers, scaler, self._settings.policy)
            stats, grad_scale = self._advance(listed, loss_scale, optimizers)
        policy = self._settings.policy
        skips = loss_scale.enabled or policy == "skip"
        skips = skips or (policy == "zero" and stats.contributions is not None)
        stepping.take(optimizers, loss_scale, stats.found_inf if skips else None, grad_scale)
        if self.overlap is not None:
            self.overlap.forget()  # a fused optimizer writes gradients and leaves no mark
        return stats

    @torch.no_grad()
    def measure(self) -> GradStats:
        """The statistics that `clip_` would return; nothing is written, counted or remembered.

        They are of the gradients as these are stored, as `clip_` without a scaler: under a loss
        scale still multiplied by it, and so are norms that a rule compares with its thresholds.

        Never raises for elements that are not finite. Under ``nonfinite="zero"``, where there may
        be such elements, this works on a copy of the gradients.
        """
        if torch.compiler.is_compiling():
            from fastclip import uncompiled

            return uncompiled.call(self.measure)
        with self._attended() as listed:
            step = self._step(listed, WithoutScaler(), copy(self._remembered))
            return step.decide(dry=True).stats()

    def accumulating(self) -> AbstractContextManager[None]:
        """For ``with``, around the backward of each micro-batch of an accumulation but the last:
        with ``overlap=True`` nothing is measured there in vain. Results do not depend on it.
        """
        return nullcontext() if self.overlap is None else self.overlap.accumulating()

    def counters(self) -> dict[str, Tensor]:
        """`steps` (calls of `clip_` and `step`), `clipped`, `skipped` and `consecutive_skips` so
        far: int64, 0-d, on the gradients' device.
        """
        return self._counters.read()

    def state_dict(self) -> dict[str, Any]:
        """Counters and the rule's state; of a rule per tensor by parameter name."""
        return {
            "version": VERSION,
            "counters": self._counters.read(),
            "rule": type(self._settings.rule).__name__,
            "state": self._remembered.dump(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. The options of the rule stay those of this clipper.

        Parameters whose names are missing start afresh; a `UserWarning` lists names that are not
        known here, whose state is dropped. Raises `ValueError`, with nothing changed, for another
        rule's state and for one of which a part is damaged.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"the state of a GradClipper is a mapping, got {type(state_dict).__name__}"
            )
        missing = [key for key in KEYS if key not in state_dict]
        if missing:
            raise ValueError(f"this is no state of a GradClipper: it has no {missing[0]!r}")
        if state_dict["version"] != VERSION:
            raise ValueError(
                f"the state has version {state_dict['version']!r}, where {VERSION} is known"
            )
        rule = type(self._settings.rule).__name__
        if state_dict["rule"] != rule:
            raise ValueError(
                f"the state is of the rule {state_dict['rule']}, and this clipper has {rule}"
            )
        names = state_dict["state"]
        counters, remembered = Counters(), copy(self._remembered)
        counters.load(state_dict["counters"])
        extra = remembered.load(names, self._names())
        self._counters, self._remembered = counters, remembered
        self._loaded = remembered.checksum()
        if extra:
            more = f" and {len(extra) - SHOWN} more" if len(extra) > SHOWN else ""
            none = len(extra) == len(names)
            warnings.warn(
                "the state has parameters that this clipper does not have: "
                f"{', '.join(extra[:SHOWN])}{more}. What it says of them is dropped"
                + ("; no name is known here, so every tensor starts afresh" if none else ""),
                stacklevel=2,
            )

    def __repr__(self) -> str:
        rule, p, policy = self._settings
        overlap = "" if self.overlap is None else f", overlap={self.overlap!r}"
        groups = "" if self._groups is None else f", process_group=<{self._groups!r}>"
        return (
            f"GradClipper({len(self._listing.read()[0])} parameters, rule={rule!r}, norm_type={p}, "
            f"nonfinite={policy!r}{groups}{overlap})"
        )

    def _met(self, process_group: Any, counts: Any) -> "Groups | None":
        if process_group is not None:
            from fastclip.distributed.groups import Groups

            return Groups(process_group, counts, *self._listing.read(), self._settings)
        if counts is not None:
            raise TypeError("counts is for the parameters of a process_group, and there is none")
        return None

    @contextmanager
    def _attended(self) -> Iterator[Listed]:
        """The gradients, for what is done up to the last exchange: no rank is left waiting."""
        alone = self._groups is not None
        with nullcontext() if self._groups is None else self._groups.attended():
            tensors, names = self._listing.read()
            listed = Listed([each.grad for each in tensors], names, tensors, alone)
            with listed.attended():
                yield listed

    def _names(self) -> Sequence[str]:
        """Of all parameters whose gradients have a row: under process groups, those of all ranks"""
        return self._listing.labels() if self._groups is None else self._groups.names

    def _step(self, listed: Listed, loss_scale: WithoutScaler, remembered: Remembered) -> Step:
        parameters = listed.parameters
        if self.overlap is not None:
            self.overlap.watch(parameters)
            if loss_scale.enabled and loss_scale.inv_scale is None:
                self.overlap.forget()  # the user has unscaled them, which leaves no mark
        loss_scale.add_others(parameters, listed)
        return Step(
            self._settings,
            self._counters.steps,
            parameters,
            listed,
            loss_scale,
            self._measure,
            remembered.rows,
            self._groups,
            self._loaded,
        )

    def _measure(
        self, listed: Listed, inv_scale: Tensor | None, by_unit: bool
    ) -> tuple[Gradients, Tensor]:
        """The one read of the gradients; `by_unit` with their `unit_norms`, if it can."""
        p = self._settings.p
        if not listed.grads:
            return Gradients.of_rows(()), tables.empty(p, 0, torch.device("cpu"))
        active = passes.active(listed)
        if self.overlap is not None and active is passes:
            return self.overlap.measure(listed, inv_scale)
        measure = active.measure_units if by_unit else active.measure
        found, table = measure(listed, p, inv_scale)
        return found, table

    @torch.no_grad()
    def _advance(
        self, listed: Listed, loss_scale: WithoutScaler, optimizers: Sequence[Optimizer]
    ) -> tuple[GradStats, Tensor | None]:
        """One step up to the optimizers', and what they are to divide the gradients by, if so."""
        step = self._step(listed, loss_scale, self._remembered)
        done = watching.clips(step.parameters, self._limit(), unscales=loss_scale.enabled)
        folds = len(optimizers) > 0 and self._folds(optimizers, step)
        if not folds and not self._warned:
            self._warned = stepping.warn_of_strangers(optimizers, step.parameters)
        grad_scale = None
        if not folds and step.at_once and self.overlap is None and self._groups is None:
            decided = step.clip_at_once_()
        else:
            decided = step.decide()
            if folds and decided.foldable(step.listed):
                grad_scale = decided.leave_(step.listed)
            else:
                decided.write_()
        done()
        stats = decided.stats()
        loss_scale.record(decided.bad)
        if decided.found.names:  # else the rule was not asked
            self._remembered.keep(decided.decision.state)
        self._counters.count(stats.clipped, stats.skipped)
        self._loaded = 0
        return stats, grad_scale

    def _limit(self) -> float | Tensor | None:
        """The threshold a guard is told; not that of a schedule, which is asked once a step."""
        rule = self._settings.rule
        if isinstance(rule, MaxNorm) and not callable(rule.max_norm):
            return rule.limit(0)
        return None

    def _folds(self, optimizers: Sequence[Optimizer], step: Step) -> bool:
        return (
            len(step.listed.grads) > 0
            and not self._settings.rule.per_tensor
            and all(map(folding.honours, optimizers))
            and folding.covers(optimizers, step.parameters)
            and folding.aligned(step.held, step.listed)
        )
