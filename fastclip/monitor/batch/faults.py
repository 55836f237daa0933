"""Who is at fault: decided from what a forward and a backward pass measured, without torch."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple


class NonFiniteOrigin(NamedTuple):
    """Where numbers first cease to be finite.

    Attributes:
        module: its name in `named_modules`; "" is the model itself, and also the code of
            `forward()` around it.
        where: "input", "forward" or "backward".
    """

    module: str
    where: str


class Output(NamedTuple):
    """One call of a module: the largest magnitudes in what it was given and in what it returned."""

    module: str
    given: float
    returned: float


class Gradient(NamedTuple):
    """One operation of the backward pass, and the largest magnitudes of the gradients in it.

    `call` tells the call of `module` that the operation belongs to from its other calls.
    `incoming` and `outgoing` are of all gradients that the operation was given and that it gave;
    `leaving` is of those it gave to operations of other calls, and to parameters.
    """

    call: int
    module: str
    incoming: float
    outgoing: float
    leaving: float


def largest(magnitudes: Iterable[float]) -> float:
    """NaN where one of them is NaN, which `max` would hide; 0.0 of none."""
    values = list(magnitudes)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def forward_origin(outputs: Sequence[Output], loss: float) -> NonFiniteOrigin | None:
    """`outputs` in the order in which the calls ended: inner modules end before the outer one."""
    for module, given, returned in outputs:
        if not math.isfinite(returned):
            return NonFiniteOrigin(module, "forward" if math.isfinite(given) else "input")
    return None if math.isfinite(loss) else NonFiniteOrigin("", "forward")


def backward_origin(gradients: Sequence[Gradient], finite: bool) -> NonFiniteOrigin | None:
    """`gradients` in the order of execution; `finite`: whether those of all parameters are.

    A non-finite gradient that the same call of the module takes away again, as a mask does, never
    leaves the module and is no fault. Where every operation is in order and yet a parameter's
    gradient is not finite, a sum overflowed: of what several uses of one tensor sent back.
    """
    for i, (call, module, incoming, outgoing, _) in enumerate(gradients):
        if not math.isfinite(incoming) or math.isfinite(outgoing):
            continue
        if any(not math.isfinite(later.leaving) for later in gradients[i:] if later.call == call):
            return NonFiniteOrigin(module, "backward")
    if finite:
        return None
    touched = (g.module for g in gradients if not math.isfinite(g.incoming + g.outgoing))
    return NonFiniteOrigin(next(chain(touched, [""])), "backward")
