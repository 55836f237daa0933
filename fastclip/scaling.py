"""Steps under a `torch.amp.GradScaler`: what `scaler.unscale_` does, in the clipper's own passes.

A scaler keeps, per optimizer, a stage (READY, UNSCALED or STEPPED since its last update) and the
flags that its step and update go by. They are private to torch: every use of them is in this file.
"""

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastclip import accelerated, passes
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed

ORDER = (
    "the order is scaler.scale(loss).backward(), then clipper.step(optimizer, scaler=scaler) or "
    "clipper.clip_(optimizer, scaler=scaler) and scaler.step(optimizer), then scaler.update()"
)

# In a scaler's state of an optimizer, which its update drops: the gradients as clip_ left them.
_LEFT = "left by fastclip"

# Lightning's: their step asks the framework's scaler, which knows only the optimizer inside.
_WRAPPERS = ("LightningOptimizer", "_FabricOptimizer")


class WithoutScaler:
    """One step without an enabled scaler: there is nothing to take out, and nobody to tell."""

    enabled = False
    inv_scale: Tensor | None = None  # 0-d float32, takes the loss scale out
    inverse: Tensor | None = None  # the same, also where the user has taken it out
    optimizers: Sequence[Optimizer] = ()
    alone = True  # the clipper's gradients are all there is to check and to unscale

    def add_others(self, clipped: Sequence[Tensor], listed: Listed) -> None:
        """Find the optimizers' gradients that are not the clipper's: they are unscaled and checked
        as well. `clipped` are the clipper's parameters, with `listed` gradients.

        Raises `ValueError` if one of the clipper's gradients belongs to no optimizer.
        """

    def found_elsewhere(self, device: torch.device) -> Tensor | None:
        """Whether an element that is not the clipper's is not finite, 0-d bool; for gradients that
        the user has unscaled, whether the scaler has found one anywhere. None if there are none."""
        return None

    def unscale_others_(self, found: Tensor) -> None:
        """Take the loss scale out of gradients that are not the clipper's, unless `found`."""

    def record(self, found: Tensor) -> None:
        """Leave the scaler as its ``unscale_`` does: with a flag for its step and its update."""

    def note_clipped(self) -> None:
        """Remember the gradients as they are, so that a backward that adds to them is noticed."""

    def step(self, optimizer: Optimizer) -> None:
        """``scaler.step``: steps unless the flag is set."""
        optimizer.step()

    def note_stepped(self, optimizer: Optimizer) -> None:
        """Leave the scaler as its ``step`` does, for a step that it was not asked to make."""


class WithScaler(WithoutScaler):
    """One step of gradients that an enabled scaler has scaled. `inv_scale` is None if the user has
    called ``scaler.unscale_`` already.
    """

    enabled = True

    def __init__(self, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        if scaler._scale is None:
            raise RuntimeError(f"the scaler has not scaled a loss yet: {ORDER}")
        stages = [_state(scaler, optimizer).get("stage") for optimizer in optimizers]
        if OptState.STEPPED in stages:
            raise RuntimeError(
                "scaler.step(optimizer) has been called since the last scaler.update(), so it is "
                f"too late to clip: {ORDER}"
            )
        if any(_written_since(scaler, optimizer) for optimizer in optimizers):
            raise RuntimeError(
                "gradients have been written since clipper.clip_ took the loss scale out of them: "
                "what a backward has added is still multiplied by it. Clip once per "
                f"scaler.update(), after the last micro-batch: {ORDER}. Gradients that you have "
                "changed yourself are clipped by clipper.clip_() without the scaler"
            )
        unscaled = OptState.UNSCALED in stages
        if unscaled and set(stages) != {OptState.UNSCALED}:
            raise RuntimeError(
                "scaler.unscale_ has been called for some of the optimizers and not for others, "
                "whose gradients have no common norm: call it for all of them or for none"
            )
        if not unscaled and type(scaler).unscale_ is not GradScaler.unscale_:
            raise TypeError(
                f"{type(scaler).__name__} has an unscale_ of its own: call "
                "scaler.unscale_(optimizer) before the clipper"
            )
        self._scaler = scaler
        self._device = scaler._scale.device
        self.optimizers = optimizers
        self._listed_others: Listed | None = None
        self._others: Gradients | None = None
        # In float64 for the reason that scaler.unscale_ has: some compilers divide inexactly.
        self.inverse = scaler._scale.double().reciprocal().float()
        self.inv_scale = None if unscaled else self.inverse
        self.alone = not unscaled

    def add_others(self, clipped: Sequence[Tensor], listed: Listed) -> None:
        if self.inv_scale is None:
            return
        owned = {id(p): p for optimizer in self.optimizers for p in _parameters(optimizer)}
        mine = set(map(id, clipped))
        if not mine <= owned.keys():
            self._refuse_unowned(clipped, listed, owned.keys())
        parameters = [p for key, p in owned.items() if key not in mine]
        others = Listed([p.grad for p in parameters], None, parameters)
        if others.grads:
            self._listed_others = others
        self.alone = not others.grads

    def _refuse_unowned(
        self, clipped: Sequence[Tensor], listed: Listed, owned: Iterable[int]
    ) -> None:
        owned = set(owned)
        for parameter, label in zip(clipped, _every_label(listed), strict=True):
            if parameter.grad is not None and id(parameter) not in owned:
                raise ValueError(
                    f"{listed.called(label)} is of no optimizer that was passed, so the scaler "
                    "could not be told that its loss scale was taken out. With several optimizers: "
                    "clipper.clip_([first, second], scaler=scaler), then scaler.step of each, then "
                    "scaler.update(); a parameter of none is left out of the clipper"
                )

    def found_elsewhere(self, device: torch.device) -> Tensor | None:
        if self.inv_scale is None:
            states = [_state(self._scaler, optimizer) for optimizer in self.optimizers]
            flags = [
                flag.to(device, non_blocking=device.type == "cuda")
                for state in states
                for flag in state["found_inf_per_device"].values()
            ]
            return torch.stack(flags).sum() > 0 if flags else None
        if self._listed_others is None:
            return None
        others = self._listed_others
        self._others, table = passes.active(others).measure(others, 2.0)
        return tables.found_nonfinite(table).to(device)

    def unscale_others_(self, found: Tensor) -> None:
        if self._others is not None and self.inv_scale is not None:
            inverse = self.inv_scale.to(found.device, torch.float64)
            passes.active(self._others).scale_(self._others, inverse.masked_fill(found, 1.0))

    def record(self, found: Tensor) -> None:
        for optimizer in self.optimizers:
            # Each a tensor of its own, to which update() adds; one device, since fused optimizers
            # are given the sum over devices and take nothing but 0 and 1.
            flag = found.to(self._device, torch.float32, copy=True)
            state = self._scaler._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = {flag.device: flag}
            state["stage"] = OptState.UNSCALED

    def note_clipped(self) -> None:
        for optimizer in self.optimizers:
            state = self._scaler._per_optimizer_states[id(optimizer)]
            state[_LEFT] = _marks(_gradients(optimizer))

    def step(self, optimizer: Optimizer) -> None:
        self._scaler.step(optimizer)

    def note_stepped(self, optimizer: Optimizer) -> None:
        self._scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED


def scale_of(optimizer: Any, scaler: Any, policy: str) -> WithoutScaler:
    """What there is to know of the loss scale for one step; `optimizer` is one or several."""
    if scaler is None:
        return WithoutScaler()
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if optimizer is None:
        raise TypeError("with a scaler, clip_ needs the optimizer (or several) that it is to step")
    if not scaler.is_enabled():
        return WithoutScaler()
    if policy == "zero":
        raise ValueError(
            'nonfinite="zero" would hide from the scaler that its scale is too large: with an '
            'enabled scaler, use "skip"'
        )
    optimizers = optimizers_of(optimizer)
    for each in optimizers:
        _refuse_wrapper(each)
    return WithScaler(scaler, optimizers)


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """One optimizer, or several that are stepped together."""
    one = hasattr(optimizer, "param_groups") or not isinstance(optimizer, Iterable)
    optimizers = [optimizer] if one else [*optimizer]
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer must be an optimizer or several, got {type(each).__name__}")
        if accelerated.among(each):
            raise TypeError(
                "optimizers that accelerate has prepared must be passed one by one or in a list, "
                f"got {type(optimizer).__name__}"
            )
    if not optimizers:
        raise ValueError(f"optimizer must be an optimizer or several, got {optimizer!r:.80}")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ValueError(f"an optimizer comes twice among the {len(optimizers)} that were passed")
    return optimizers


def _refuse_wrapper(optimizer: Optimizer) -> None:
    """Raise `TypeError` for an optimizer whose step would take the loss scale out once more."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    wrapper = next((name for name in _WRAPPERS if name in kinds), None)
    if wrapper is not None:
        raise TypeError(
            f"{kinds[0]} is a {wrapper}, whose step hands the scaler the optimizer inside, so the "
            "loss scale would be taken out twice: call clipper.clip_(optimizer.optimizer, "
            "scaler=scaler) and then optimizer.step(), without scaler.step and scaler.update; in a "
            "LightningModule use fastclip.integrations.lightning.GradClipCallback"
        )


def claims_flags(optimizer: Optimizer) -> bool:
    """Whether ``scaler.step`` would hand the flag to the optimizer and call its step whatever it
    is."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _state(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Any]:
    return scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})


def _marks(gradients: Sequence[Tensor]) -> tuple[list["weakref.ref[Tensor]"], list[int]]:
    """The gradients and their versions, of which those of inference mode have none."""
    counted = gradients
    if any(map(Tensor.is_inference, gradients)):
        counted = [grad for grad in gradients if not grad.is_inference()]
    return list(map(weakref.ref, gradients)), [grad._version for grad in counted]


def _written_since(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients are not as `clip_` has left them, if it did since the scaler's update.

    If there are none any more, nothing is mixed.
    """
    left = _state(scaler, optimizer).get(_LEFT)
    gradients = [] if left is None else _gradients(optimizer)
    if left is None or not gradients:
        return False
    refs, versions = left
    same = len(refs) == len(gradients) and all(map(is_, [ref() for ref in refs], gradients))
    return not same or versions != _marks(gradients)[1]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    found = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [grad for grad in found if grad is not None]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _every_label(listed: Listed) -> Sequence[str]:
    return listed.names or [str(position) for position in range(len(listed.tensors))]
