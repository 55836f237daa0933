"""The passes over a gradient list, across devices: the one way from what was listed to a table,
and from coefficients back to the gradients.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fastclip import backends
from fastclip import table as tables
from fastclip.backends import units
from fastclip.backends.contract import Clipped
from fastclip.gradients import Gradients, Listed, are_plain
from fastclip.gradients import sort_out as sort_out


def active() -> ModuleType:
    """This module, or while something records what is called, the same as operators."""
    # A dispatch mode (make_fx, FakeTensorMode) sees operators alone; asking costs 50 ns.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        from fastclip import traced

        return traced
    return sys.modules[__name__]


def measure(listed: Listed, p: float, inv_scale: Tensor | None = None) -> tuple[Gradients, Tensor]:
    """The gradients, one per row, and their table on the first gradient's device.

    `inv_scale`, 0-d, takes a loss scale out of the statistics. Raises as `gradients.sort_out` does.
    """
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_measure):
        table = quick(listed.grads, p, inv_scale)
        if table is not None:
            return Gradients.of_listed(listed), table
    found = sort_out(listed)
    return found, measure_again(found, p, inv_scale)


def measure_again(found: Gradients, p: float, inv_scale: Tensor | None = None) -> Tensor:
    """The table of gradients that have been sorted out already."""
    devices = found.by_device()
    first = found.tensors[0].device
    parts = [
        backends.choose(device).measure(_select(found.tensors, rows), p, inv_scale).to(first)
        for device, rows in devices.items()
    ]
    table = parts[0]
    if len(devices) > 1:
        order = [row for rows in devices.values() for row in rows]
        lines = dict(zip(order, torch.cat(parts).unbind(), strict=True))
        table = torch.stack([lines[row] for row in range(len(lines))])  # an index would be sent
    return tables.repeat(table, p, found.repeats)


def measure_units(
    listed: Listed, p: float, inv_scale: Tensor | None = None
) -> tuple[Gradients, Tensor]:
    """`measure`, with the `unit_norms` of the gradients where that takes no other read."""
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_measure_units):
        result = quick(listed.grads, p, inv_scale)
        if result is not None:
            table, norms = result
            return Gradients.of_listed(listed, norms), table
    return measure(listed, p, inv_scale)


def unit_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norms of the units of real tensors on one device, one tensor after the other: float64
    ``[units]``."""
    quick = backends.choose(tensors[0].device).quick_unit_norms
    norms = quick(tensors) if quick and are_plain(tensors) else None
    return norms if norms is not None else torch.cat(list(map(units.unit_norms, tensors)))


def clip_(listed: Listed, p: float, max_norm: float | Tensor) -> Tensor:
    """Rescale to `max_norm`; the total norm before, 0-d, on the first gradient's device."""
    result = _quick_clip_(listed, p, max_norm, None, False)
    return _clip_(sort_out(listed), p, max_norm, None, False)[1] if result is None else result[1]


def clip_measured_(
    listed: Listed,
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> tuple[Gradients, Tensor, Tensor, Tensor]:
    """The same, with a loss scale taken out, and all that is known then: the gradients, their
    table, the total norm and the coefficient in float64. `skip` as in `contract.Backend`."""
    result = _quick_clip_(listed, p, max_norm, inv_scale, skip)
    if result is not None:
        return Gradients.of_listed(listed), *result
    found = sort_out(listed)
    return found, *_clip_(found, p, max_norm, inv_scale, skip)


def _quick_clip_(
    listed: Listed, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> Clipped | None:
    """What a backend makes of the list as it is, if it takes it so."""
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_clip_):
        return quick(listed.grads, p, max_norm, inv_scale, skip)
    return None


def _clip_(
    found: Gradients, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> Clipped:
    table = measure_again(found, p, inv_scale)
    total = tables.total_norm(table, p)
    coef, factor = tables.factors(table, total, max_norm, inv_scale, skip)
    scale_(found, factor)
    return table, total.to(tables.result_dtype(found.tensors)), coef


def rescale_(listed: Listed, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d."""
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_scale_):
        if quick(listed.grads, coef):
            return
    scale_(sort_out(listed), coef)


@torch.no_grad()
def scale_(found: Gradients, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d or ``[n]``."""
    for device, rows in found.by_device().items():
        own = coef
        if coef.dim() > 0 and len(rows) < len(coef):  # not by an index, which would be sent
            own = torch.stack([coef[row] for row in rows])
        backends.choose(device).scale_(_select(found.tensors, rows), own.to(device))
    for row, (gradient, coalesced) in found.sparse.items():
        factor = coef if coef.dim() == 0 else coef[row]
        if factor != 1:  # waits for the device, as coalescing has done before
            gradient.copy_(coalesced)


def scale_units_(gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each unit in place by its own factor: for each gradient one a unit, float64
    ``[units]``. As `Backend.scale_`; a gradient all of whose factors are 1 is not written on the
    CPU. Real gradients that share no memory."""
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        rows = [row for row, gradient in enumerate(gradients) if gradient.device == device]
        own, by = _select(gradients, rows), _select(factors, rows)
        quick = backends.choose(device).quick_scale_units_ if are_plain(own) else None
        if quick is None or not quick(own, torch.cat(by)):
            units.scale_units_(own, by)


def _select(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    return list(tensors) if len(rows) == len(tensors) else [tensors[row] for row in rows]
