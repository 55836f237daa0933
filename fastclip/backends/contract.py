"""What a backend is. Tables and coefficients are described in `fastclip.table`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fastclip import table as tables

Measure = Callable[[Sequence[Tensor], float, Tensor | None], Tensor]
Scale = Callable[[Sequence[Tensor], Tensor], None]
MeasureUnits = Callable[[Sequence[Tensor], float, Tensor | None], tuple[Tensor, Tensor] | None]
Clipped = tuple[Tensor, Tensor, Tensor]  # the table, the total norm, the coefficient


class Unavailable(RuntimeError):
    """A backend cannot be used here; the message says why in words for the user."""


class Refused(Unavailable):
    """The user asked for something about a backend that cannot be had: no other one is taken."""


class Clip(Protocol):
    def __call__(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float | Tensor,
        inv_scale: Tensor | None,
        skip: bool = False,
    ) -> Clipped: ...


class QuickClip(Protocol):
    def __call__(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float | Tensor,
        inv_scale: Tensor | None = None,
        skip: bool = False,
    ) -> Clipped | None: ...


@dataclass(frozen=True)
class Backend:
    """Functions on a list of tensors of one device that share no memory, and none of which waits
    for that device or reads an element more than once per pass.

    Args:
        name: by which it is asked for.
        device_types: of the tensors it serves: "cpu", "cuda"; None: of any.
        about: what it is made of, in words for `explain`.
        measure: ``(grads, p, inv_scale)``: the table, float64 ``[n, 5]``, of ``x * inv_scale``;
            `inv_scale` is a 0-d tensor or None.
        scale_: ``(grads, coef)``: multiply by `coef`, float64, 0-d or ``[n]``; a coefficient of
            exactly 1 writes nothing.
        clip_: ``(grads, p, max_norm, inv_scale, skip=False)``: both for one global threshold, a
            float or a 0-d tensor: the table, the total norm in `table.result_dtype` and the
            coefficient in float64, 0-d each. Writes ``x * coef * inv_scale``, and nothing when
            that factor is 1. With `skip`, an element that is not finite means that nothing is
            written and that the coefficient is 1.
        quick_measure: `measure` for a list as the caller passed it: None, with nothing touched, if
            it is anything but plain distinct tensors that the kernels serve as they are. That
            saves looking at each tensor in Python, which costs more than a small tensor itself.
        quick_scale_: the same of `scale_`; False if it is anything else.
        quick_clip_: the same of `clip_`.
        quick_measure_units: ``(grads, p, inv_scale)``: `quick_measure`, and of each tensor's units
            (the slices along its first dimension; a tensor of fewer than two is one) the 2-norms
            as they are stored: float64 ``[units]``, one tensor after the other. Without it units
            are the reference's (`backends.units`).
        quick_unit_norms: ``(tensors)``: those norms alone, also of tensors that share memory.
        quick_scale_units_: ``(grads, coef)``: `quick_scale_` with a coefficient for each unit,
            float64 ``[units]``.
    """

    name: str
    device_types: frozenset[str] | None  # None: any
    about: str
    measure: Measure
    scale_: Scale
    clip_: Clip
    quick_measure: Callable[[Sequence[Tensor], float, Tensor | None], Tensor | None] | None = None
    quick_scale_: Callable[[Sequence[Tensor], Tensor], bool] | None = None
    quick_clip_: QuickClip | None = None
    quick_measure_units: MeasureUnits | None = None
    quick_unit_norms: Callable[[Sequence[Tensor]], Tensor | None] | None = None
    quick_scale_units_: Callable[[Sequence[Tensor], Tensor], bool] | None = None

    def serves(self, device_type: str) -> bool:
        return self.device_types is None or device_type in self.device_types


def clip_in_passes(
    measure: Measure,
    scale_: Scale,
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool,
) -> Clipped:
    """`Backend.clip_` from the other two functions, for what has no fused form."""
    table = measure(grads, p, inv_scale)
    total = tables.total_norm(table, p)
    coef, factor = tables.factors(table, total, max_norm, inv_scale, skip)
    scale_(grads, factor)
    return table, total.to(tables.result_dtype(grads)), coef
