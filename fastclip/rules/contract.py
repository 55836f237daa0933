"""What a rule is, and what rules share."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.backends import units as by_unit
from fastclip.checks import require as require

State = dict[str, Tensor]


class Measured(NamedTuple):
    """What a rule sees of one step: n gradients, on the device of the first one.

    Norms are those of the whole gradients before clipping, without the loss scale; `parameters` and
    `gradients` are what this process holds of DTensors, and empty under process groups.

    Attributes:
        total: the norm of all gradients as one vector, 0-d float64.
        norms: ``[n]`` float64.
        step: steps before this one, skipped ones included.
        parameters: n of them, on their own devices.
        gradients: n of them, as they are stored: still times the loss scale.
        inv_scale: one over the loss scale, 0-d; None without one.
        unit_norms: 2-norms of the gradients' units, one gradient after the other, float64
            ``[units]``, as stored: for a rule with `by_unit`, where the backend finds them in the
            same read.
        whole_units: of DTensors over several processes, for a rule with `by_unit`: for each tensor
            the 2-norms of the whole units that `gradients` and `parameters` have parts of, in this
            order, float64 ``[2, units]``; the gradients' as stored.
    """

    total: Tensor
    norms: Tensor
    step: int
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    inv_scale: Tensor | None
    unit_norms: Tensor | None = None
    whole_units: Sequence[Tensor] | None = None


class Decision(NamedTuple):
    """What to multiply the gradients by, why, and what to remember.

    Attributes:
        coef: float64, 0-d, or ``[n]`` from a rule per tensor.
        threshold: what it was computed from, of the same shape.
        state: after this step.
        units: from a rule that scales units (the slices along a tensor's first dimension): for each
            tensor one coefficient per unit, float64 ``[units]`` on the tensor's own device; `coef`
            and `threshold` then are each tensor's smallest.
    """

    coef: Tensor
    threshold: Tensor
    state: State
    units: Sequence[Tensor] | None = None

    def unless(self, found: Tensor, state: State) -> "Decision":
        """This decision; where `found` (0-d bool) holds, coefficients of 1 and the old `state`."""
        units = self.units
        if units and tables.peek(found) != 0:
            units = [part.masked_fill(found.to(part.device), 1.0) for part in units]
        return Decision(
            self.coef.masked_fill(found, 1.0),
            self.threshold,
            {name: torch.where(found, state[name], new) for name, new in self.state.items()},
            units,
        )

    def where_present(self, present: Tensor, state: State) -> "Decision":
        """This decision for the tensors that have a gradient, `present`, ``[n]`` bool; for others,
        and for all if the rule is not one per tensor and none has, coefficients of 1 and the old
        `state`."""
        if self.coef.dim() == 0:
            return self.unless(~present.any(), state)
        new = {
            name: torch.where(present.view(-1, *[1] * (part.dim() - 1)), part, state[name])
            for name, part in self.state.items()
        }
        return self._replace(coef=self.coef.masked_fill(~present, 1.0), state=new)

    def nonfinite(self) -> Tensor:
        """Whether a coefficient is NaN or infinite, 0-d bool, on the device of `coef`."""
        found = _nonfinite(self.coef)
        units = self.units or ()
        for device in dict.fromkeys(part.device for part in units):
            own = torch.cat([part for part in units if part.device == device])
            found = found | _nonfinite(own).to(found.device)
        return found


class Rule(Protocol):
    """From norms to coefficients.

    Both methods are made of tensor operations on the device of the norms, none of which waits for
    it: no ``.item()``, no ``if`` on a tensor, no ``torch.tensor(...)`` sent there. `decide` changes
    nothing in place.

    A rule that has an attribute `by_unit`, true, is given `Measured.unit_norms` where that costs
    nothing. A rule per tensor that has it is given `Measured.whole_units` of DTensors over several
    processes, and only such a rule may scale these by unit. Its `coef` and `threshold` then are the
    smallest of what it has said on any process.

    A norm that is NaN or infinite leaves the state bitwise as it was (its own row of the state, in
    a rule per tensor). The coefficient then is what the formula makes of it: what becomes of such
    a step is not the rule's to say. One that is not finite although all elements are makes
    ``nonfinite="skip"`` skip the step, and ``"error"`` raise.
    """

    @property
    def per_tensor(self) -> bool:
        """Whether there is a coefficient per tensor. State tensors then have a first dimension of
        n, whose rows are kept by parameter name."""

    def init(self, n: int, device: torch.device) -> State:
        """The state before the first step, float64 or int64; per tensor, that of n new rows."""

    def decide(self, measured: Measured, state: State) -> Decision:
        """The coefficients of one step, and the state after it."""


class UnsuitableGradient(TypeError):
    """A rule cannot take the gradient of a row; `reason` continues "the gradient of ..."."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"the gradient of row {row} {reason}")
        self.row = row
        self.reason = reason


def bounded(
    total: Tensor, binds: Tensor, threshold: Tensor, max_norm: float | None
) -> tuple[Tensor, Tensor]:
    """The coefficient, and the threshold it comes from: `threshold` where it `binds`, else
    infinity, and never more than `max_norm`.
    """
    threshold = torch.where(binds, threshold, math.inf)
    if max_norm is not None:
        threshold = threshold.clamp(max=max_norm)
    return tables.coefficient(total, threshold), threshold


def require_decision(rule: Rule, decision: object, measured: Measured, state: State) -> None:
    """Raise unless `decision`, which `rule` has made of `measured` and `state`, is one in form.

    Raises `TypeError` or `ValueError` that names the rule's class. Looks at no value.
    """
    kind = type(rule).__name__
    if not isinstance(decision, Decision):
        raise TypeError(f"{kind}.decide must return a Decision, got {type(decision).__name__}")
    shape = measured.norms.shape if rule.per_tensor else measured.total.shape
    form = (torch.float64, shape, measured.total.device)
    _require_form(f"the coef of {kind}", decision.coef, *form)
    _require_form(f"the threshold of {kind}", decision.threshold, *form)
    if not isinstance(decision.state, dict):
        what = type(decision.state).__name__
        raise TypeError(f"the state of {kind} must be a dict of Tensors, got {what}")
    if decision.state.keys() != state.keys():
        raise ValueError(
            f"the state of {kind} must have the keys {sorted(state)}, got {sorted(decision.state)}"
        )
    for name, part in state.items():
        what = f"the state {name!r} of {kind}"
        _require_form(what, decision.state[name], part.dtype, part.shape, part.device)
    if decision.units is None:
        return
    if not rule.per_tensor or len(decision.units) != len(measured.gradients):
        raise ValueError(
            f"the units of {kind} must be those of {len(measured.gradients)} gradients, from a "
            f"rule with per_tensor = True, got {len(decision.units)} with {rule.per_tensor}"
        )
    for number, (part, gradient) in enumerate(zip(decision.units, measured.gradients, strict=True)):
        what = f"the units of gradient {number} of {kind}"
        _require_form(what, part, torch.float64, (by_unit.count(gradient),), gradient.device)


def _require_form(
    what: str, value: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless it is a Tensor of that dtype, shape and device."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what} must be a Tensor of {dtype}, got {got}")
    if value.shape != shape or value.device != device:
        raise ValueError(
            f"{what} must have shape {tuple(shape)} on {device}, got "
            f"{tuple(value.shape)} on {value.device}"
        )


def _nonfinite(x: Tensor) -> Tensor:
    return (x * 0).sum() != 0  # three operations, where isfinite().all() is seven


def keep(usable: Tensor, new: State, old: State) -> State:
    """The new state where the step was `usable`, else the old one."""
    return {name: torch.where(usable, new[name], old[name]) for name in new}


def scalars(device: torch.device, *names: str, counts: Sequence[str] = ()) -> State:
    """Zeros: float64 for `names`, int64 for `counts`, 0-d."""
    state = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
    return state | {name: torch.zeros((), dtype=torch.int64, device=device) for name in counts}


def require_max_norm(max_norm: object) -> None:
    if max_norm is not None:
        what = "a number of at least 0 or None"
        require("max_norm", max_norm, what, lambda x: x >= 0, infinite=True)
