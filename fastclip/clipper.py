"""The stateful step: measure, decide, clip, step."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import folding, passes, policy, stepping
from fastclip import table as tables
from fastclip.functional import order
from fastclip.gradients import Gradients, Listed, Parameters
from fastclip.listing import Listing, of_rows, require_distinct
from fastclip.memory import Counters, Remembered
from fastclip.overlap import Overlap
from fastclip.policy import POLICIES, Policy
from fastclip.rules import Decision, MaxNorm, Measured, Rule, UnsuitableGradient, scale_units_
from fastclip.scaling import WithoutScaler, scale_of
from fastclip.stats import GradStats

VERSION = 1  # of the format of `state_dict`

INSTEAD = 'nonfinite="skip" skips such steps'
ELSEWHERE = (
    "the gradients are not finite: one of the optimizer that is not the clipper's, or one that "
    "scaler.unscale_ has looked at"
)


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
    apart and the host never waits for the device.

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
            - ``"zero"``: set those elements to 0, then clip and step;
            - ``"error"``: raise `RuntimeError` naming the parameters, before anything is written;
              this waits for the device at every step;
            - ``"propagate"``: clip and step all the same, as torch does.
        overlap: measure large gradients during backward, by hooks (see `fastclip.overlap`). What
            hooks cannot vouch for is measured by the step as ever; `self.overlap` says how much.
            Pass a scaler to `clip_` or `step` then, rather than calling ``unscale_``.

    Raises:
        TypeError: both `max_norm` and `rule` are given, or something is of a wrong type.
        ValueError: `max_norm` is negative or NaN, or `norm_type` or `nonfinite` is unknown.
    """

    def __init__(
        self,
        parameters: Parameters,
        max_norm: float | Tensor | Callable[[int], float] | None = None,
        *,
        rule: Rule | None = None,
        norm_type: float | str = 2.0,
        nonfinite: Policy = "skip",
        overlap: bool = False,
    ) -> None:
        self._listing = Listing(parameters)
        self._rule = _rule(max_norm, rule)
        self._p = order(norm_type)
        if nonfinite not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ValueError(f"nonfinite must be one of {known}, got {nonfinite!r:.80}")
        self._policy = nonfinite
        self._counters = Counters()
        self._remembered = Remembered(self._rule)
        if self._rule.per_tensor:
            require_distinct(self._listing.labels())
        self.overlap = Overlap(self._p) if overlap else None
        if self.overlap is not None:
            self.overlap.watch(self._listing.read()[0])

    def clip_(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
    ) -> GradStats:
        """Measure the gradients and rescale them in place.

        With a `scaler`, the loss scale of all gradients of `optimizer` (one, or several whose
        gradients have one global norm) is taken out as ``scaler.unscale_`` does; then call
        ``scaler.step`` of each and ``scaler.update``. Gradients that the user has unscaled already
        are just clipped. Without a scaler, `optimizer` changes nothing.

        Raises:
            TypeError: a `scaler` without `optimizer`, or a gradient is of an unsupported type.
            RuntimeError: ``nonfinite="error"`` found a NaN or an infinity; the scaler's calls come
                in a wrong order; or a gradient's elements share memory.
            ValueError: an enabled scaler with ``nonfinite="zero"``; a gradient of none of the
                optimizers given with a scaler; or a schedule gave a negative or NaN threshold.
        """
        loss_scale = scale_of(optimizer, scaler, self._policy)
        with torch.no_grad():
            return self._advance(loss_scale, None)[0]

    def step(self, optimizer: Optimizer, scaler: GradScaler | None = None) -> GradStats:
        """Clip the gradients and take the optimizer's step, or skip it.

        Replaces ``optimizer.step()``, or with a `scaler` ``scaler.step(optimizer)``; the call of
        ``scaler.update()`` stays. Errors as in `clip_`.
        """
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"step takes one optimizer, got {type(optimizer).__name__}; with several, clip_ "
                "once and step each"
            )
        loss_scale = scale_of(optimizer, scaler, self._policy)
        with torch.no_grad():
            stats, grad_scale = self._advance(loss_scale, optimizer)
        skips = loss_scale.enabled or self._policy == "skip"
        stepping.take(optimizer, loss_scale, stats.found_inf if skips else None, grad_scale)
        if self.overlap is not None:
            self.overlap.forget()  # a fused optimizer writes gradients and leaves no mark
        return stats

    @torch.no_grad()
    def measure(self) -> GradStats:
        """The statistics that `clip_` would return; nothing is written, counted or remembered.

        Never raises for elements that are not finite. Under ``nonfinite="zero"``, where there may
        be such elements, this works on a copy of the gradients.
        """
        parameters, listed = self._listed()
        return self._stats(
            self._look(parameters, listed, WithoutScaler(), dry=True), WithoutScaler()
        )

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
            "rule": type(self._rule).__name__,
            "state": self._remembered.dump(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. The options of the rule stay those of this clipper.

        Parameters whose names are missing start afresh; a `UserWarning` lists names that are not
        known here. Raises `ValueError`, with nothing changed, for another rule's state.
        """
        if state_dict.get("version") != VERSION:
            version = state_dict.get("version")
            raise ValueError(f"the state has version {version!r}, where {VERSION} is known")
        if state_dict["rule"] != type(self._rule).__name__:
            raise ValueError(
                f"the state is of the rule {state_dict['rule']}, and this clipper has "
                f"{type(self._rule).__name__}"
            )
        extra = self._remembered.load(state_dict["state"], self._listing.labels())
        self._counters.load(state_dict["counters"])
        if extra:
            warnings.warn(
                "the state has parameters that this clipper does not have: " + ", ".join(extra),
                stacklevel=2,
            )

    def _listed(self) -> tuple[list[Tensor], Listed]:
        parameters, names = self._listing.read()
        if self.overlap is not None:
            self.overlap.watch(parameters)
        return parameters, Listed([parameter.grad for parameter in parameters], names)

    def _measure(self, listed: Listed, loss_scale: WithoutScaler) -> tuple[Gradients, Tensor]:
        """The one read of the gradients."""
        if not listed.grads:
            return Gradients.of_rows(()), tables.empty(self._p, 0, torch.device("cpu"))
        inv_scale, active = loss_scale.inv_scale, passes.active()
        if self.overlap is None or active is not passes:
            return active.measure(listed, self._p, inv_scale)
        if loss_scale.enabled and inv_scale is None:
            self.overlap.forget()  # the user has unscaled them, which leaves no mark
        return self.overlap.measure(listed, inv_scale)

    def _advance(
        self, loss_scale: WithoutScaler, optimizer: Optimizer | None
    ) -> tuple[GradStats, Tensor | None]:
        """One step up to the optimizer's, and what that is to divide the gradients by, if it is."""
        parameters, listed = self._listed()
        loss_scale.add_others(parameters, listed)
        folds = self._folds(optimizer, parameters, listed)
        grad_scale = None
        if not folds and self._at_once(listed, loss_scale):
            looked = self._clip_at_once_(listed, loss_scale)
        else:
            looked = self._look(parameters, listed, loss_scale, dry=False)
            if folds and folding.suits(looked.found, listed):
                grad_scale = self._leave(looked, loss_scale)
            else:
                self._write_(looked, loss_scale)
        stats = self._stats(looked, loss_scale)
        loss_scale.record(looked.bad)
        self._remembered.keep(looked.decision.state)
        self._counters.count(stats.clipped, stats.skipped)
        return stats, grad_scale

    def _folds(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], listed: Listed
    ) -> bool:
        return (
            optimizer is not None
            and len(listed.grads) > 0
            and not self._rule.per_tensor
            and folding.honours(optimizer)
            and folding.covers(optimizer, parameters)
        )

    def _skips(self, loss_scale: WithoutScaler) -> bool:
        """Whether a step that is not finite leaves everything alone; a scaler skips it anyway."""
        return loss_scale.enabled or self._policy in ("skip", "error")

    def _at_once(self, listed: Listed, loss_scale: WithoutScaler) -> bool:
        """Whether the fused form does it all: one threshold, and nothing else to ask."""
        return (
            isinstance(self._rule, MaxNorm)
            and len(listed.grads) > 0
            and self._policy in ("skip", "propagate")
            and loss_scale.alone
            and self.overlap is None
        )

    def _clip_at_once_(self, listed: Listed, loss_scale: WithoutScaler) -> "_Looked":
        assert isinstance(self._rule, MaxNorm)
        limit = self._rule.limit(self._counters.steps)
        found, table, total, coef = passes.active().clip_measured_(
            listed,
            self._p,
            limit,
            loss_scale.inv_scale,
            self._skips(loss_scale),
        )
        return _Looked(
            found,
            table,
            total,
            Decision(coef, tables.limit(limit, coef.device), {}),
            tables.found_nonfinite(table),
        )

    def _look(
        self, parameters: Sequence[Tensor], listed: Listed, loss_scale: WithoutScaler, dry: bool
    ) -> "_Looked":
        """Measure and decide. What the policy writes is written, unless `dry`."""
        inv_scale = loss_scale.inv_scale
        found, table = self._measure(listed, loss_scale)
        bad = tables.found_nonfinite(table)
        elsewhere = loss_scale.found_elsewhere(bad.device)
        if elsewhere is not None:
            bad = bad | elsewhere
        if self._policy == "error" and not dry:
            policy.refuse(table, listed, found.names, self._p, INSTEAD)
            if elsewhere is not None and elsewhere.item():
                raise RuntimeError(f"{ELSEWHERE}. No gradient has been changed; {INSTEAD}")
        if self._policy == "zero" and dry:
            found, table = policy.zeroed(found, table, self._p)
        elif self._policy == "zero":
            table = policy.zero_(found, table, self._p)
        total = tables.total_norm(table, self._p)
        state = self._remembered.rows(found.names, table.device)
        if found.names:
            decision = self._decide(found, table, total, parameters, listed, inv_scale, state)
        else:
            total = torch.zeros_like(total)  # as clip_grad_norm_ returns, whatever the order
            one = torch.ones_like(tables.norms(table, self._p) if self._rule.per_tensor else total)
            decision = Decision(one, one * math.inf, state)
        if self._skips(loss_scale):
            decision = decision.unless(bad, state)
        return _Looked(found, table, total, decision, bad)

    def _decide(
        self,
        found: Gradients,
        table: Tensor,
        total: Tensor,
        parameters: Sequence[Tensor],
        listed: Listed,
        inv_scale: Tensor | None,
        state: dict[str, Tensor],
    ) -> Decision:
        measured = Measured(
            total,
            tables.norms(table, self._p),
            self._counters.steps,
            of_rows(parameters, listed, found),
            found.tensors,
            inv_scale,
        )
        try:
            return self._rule.decide(measured, state)
        except UnsuitableGradient as error:
            name = found.names[error.row]
            raise TypeError(f"{listed.called(name)} {error.reason}") from None

    def _leave(self, looked: "_Looked", loss_scale: WithoutScaler) -> Tensor:
        """What the optimizer is to divide the gradients by."""
        coef = looked.decision.coef
        inv_scale = loss_scale.inv_scale
        factor = coef if inv_scale is None else coef * inv_scale.to(coef.device)
        rest, grad_scale = folding.split(factor)
        if tables.peek(rest) != 1:
            passes.active().scale_(looked.found, rest)
        return grad_scale

    def _write_(self, looked: "_Looked", loss_scale: WithoutScaler) -> None:
        """Rescale in place."""
        inv_scale = loss_scale.inv_scale

        def factor(coef: Tensor) -> Tensor:
            if inv_scale is None:
                return coef
            unscaled = coef * inv_scale.to(coef.device)
            return torch.where(looked.bad.to(coef.device), 1.0, unscaled)

        if looked.decision.units is not None:
            scale_units_(looked.found.tensors, list(map(factor, looked.decision.units)))
        else:
            passes.active().scale_(looked.found, factor(looked.decision.coef))
        loss_scale.unscale_others_(looked.bad)

    def _stats(self, looked: "_Looked", loss_scale: WithoutScaler) -> GradStats:
        never = torch.zeros_like(looked.bad)
        return GradStats.decided(
            looked.found,
            looked.table,
            self._p,
            looked.total,
            looked.decision.coef,
            looked.decision.threshold,
            skipped=looked.bad if self._skips(loss_scale) else never,
            found_inf=never if self._policy == "zero" else looked.bad,
        )


class _Looked(NamedTuple):
    """What a step has found, and decided."""

    found: Gradients
    table: Tensor
    total: Tensor
    decision: Decision
    bad: Tensor  # 0-d bool: an element is not finite, of these gradients or of the optimizers'


def _rule(max_norm: Any, rule: Any) -> Rule:
    if rule is None:
        return MaxNorm(1.0 if max_norm is None else max_norm)
    if max_norm is not None:
        raise TypeError("max_norm and rule are two ways to say when to clip: pass one of them")
    if isinstance(rule, type):
        raise TypeError(f"rule must be a rule, got the class {rule.__name__}: call it")
    if not all(hasattr(rule, name) for name in ("per_tensor", "init", "decide")):
        raise TypeError(
            "rule must have per_tensor, init and decide, as those of fastclip.rules have; got "
            f"{type(rule).__name__}"
        )
    return rule
