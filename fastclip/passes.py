"""The passes over a gradient list, across devices: the one way from what was listed to a table,
and from coefficients back to the gradients.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fastclip import backends, gradients
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed


def measure(listed: Listed, p: float) -> tuple[Gradients, Tensor]:
    """The gradients, one per row, and their table on the first gradient's device.

    Raises as `gradients.sort_out` does.
    """
    if torch.compiler.is_compiling():
        found = sorted_out(listed)
        return found, _ops().measure(found.tensors, p)
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_measure):
        table = quick(listed.grads, p)
        if table is not None:
            return Gradients.of_listed(listed), table
    found = gradients.sort_out(listed)
    return found, _measure(found, p)


def sorted_out(listed: Listed) -> Gradients:
    """As `gradients.sort_out`, which has no meaning while torch.compile traces."""
    if torch.compiler.is_compiling():
        return Gradients.of_listed(listed.distinct())
    return gradients.sort_out(listed)


def clip_(listed: Listed, p: float, max_norm: float | Tensor) -> Tensor:
    """Rescale to `max_norm`; the total norm before, 0-d, on the first gradient's device."""
    if torch.compiler.is_compiling():
        return _ops().clip_(sorted_out(listed).tensors, p, _tensor(max_norm))[1]
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_clip_):
        result = quick(listed.grads, p, max_norm)
        if result is not None:
            return result[1]
    found = gradients.sort_out(listed)
    total = tables.total_norm(_measure(found, p), p)
    scale_(found, tables.coefficient(total, max_norm))
    return total.to(tables.result_dtype(found.tensors))


def rescale_(listed: Listed, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d."""
    if listed.plain and not torch.compiler.is_compiling():
        quick_scale_ = backends.choose(listed.grads[0].device).quick_scale_
        if quick_scale_ is not None and quick_scale_(listed.grads, coef):
            return
    scale_(sorted_out(listed), coef)


@torch.no_grad()
def scale_(found: Gradients, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d or ``[n]``."""
    if torch.compiler.is_compiling():
        _ops().scale_(found.tensors, coef)
        return
    for device, rows in found.by_device().items():
        own = coef if coef.dim() == 0 else coef[rows]
        backends.choose(device).scale_(_select(found.tensors, rows), own.to(device))
    for row, (gradient, coalesced) in found.sparse.items():
        factor = coef if coef.dim() == 0 else coef[row]
        if factor != 1:  # waits for the device, as coalescing has done before
            gradient.copy_(coalesced)


def _measure(found: Gradients, p: float) -> Tensor:
    devices = found.by_device()
    first = found.tensors[0].device
    parts = [
        backends.choose(device).measure(_select(found.tensors, rows), p, None).to(first)
        for device, rows in devices.items()
    ]
    table = parts[0]
    if len(devices) > 1:
        order = [row for rows in devices.values() for row in rows]
        table = torch.cat(parts)[torch.tensor(order, device=first).argsort()]
    return tables.repeat(table, p, found.repeats)


def _ops() -> ModuleType:
    """The operators that torch.compile sees: only there are they imported, or worth their cost."""
    from fastclip import ops

    return ops


def _tensor(number: float | Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float64, device="cpu")


def _select(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    return list(tensors) if len(rows) == len(tensors) else [tensors[row] for row in rows]
