"""The passes over a gradient list, across devices: the one way from what was listed to a table,
and from coefficients back to the gradients.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastclip import backends
from fastclip import table as tables
from fastclip.backends import units
from fastclip.backends.contract import Clipped
from fastclip.gradients import Gradients, Listed, are_plain
from fastclip.gradients import sort_out as sort_out

if TYPE_CHECKING:
    from fastclip.distributed.shards import Spread


def active(gradients: Listed | Gradients | None = None) -> ModuleType:
    """This module, or while something records what is called, the same as operators.

    Operators know of one process: `gradients` that several hold go through here always.
    """
    united = isinstance(gradients, Gradients) and gradients.united is not None
    if united or (gradients is not None and gradients.spread is not None):
        return sys.modules[__name__]
    if torch.compiler.is_compiling() or _sees_operators():
        from fastclip import traced

        return traced
    return sys.modules[__name__]


def _sees_operators() -> bool:
    """Whether a dispatch mode (make_fx, FakeTensorMode) or a transform of torch.func is on, whose
    tensors have no memory that kernels could be given. Asking costs 100 ns."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def measure(listed: Listed, p: float, inv_scale: Tensor | None = None) -> tuple[Gradients, Tensor]:
    """The gradients, one per row, and their table on the first gradient's device.

    `inv_scale`, 0-d, takes a loss scale out of the statistics. Raises as `gradients.sort_out` does.
    """
    if listed.spread is not None:
        return _measure_spread(listed, listed.spread, p, inv_scale)
    return _measure(listed, p, inv_scale, {})


def _measure(
    listed: Listed, p: float, inv_scale: Tensor | None, reduced: Mapping[int, Tensor]
) -> tuple[Gradients, Tensor]:
    """What this process holds; `reduced` are copies to measure instead, by place."""
    quick = backends.choose(listed.grads[0].device).quick_measure if listed.plain else None
    if quick is not None and not reduced:
        table = quick(listed.grads, p, inv_scale)
        if table is not None:
            return Gradients.of_listed(listed), table
    found = sort_out(listed)
    return found, _measure_again(found, p, inv_scale, reduced)


def _measure_spread(
    listed: Listed, spread: "Spread", p: float, inv_scale: Tensor | None
) -> tuple[Gradients, Tensor]:
    """What several processes hold together, the same on each of them."""
    with listed.attended():
        found, table = _measure(listed, p, inv_scale, spread.reduced(listed.grads))
        assert found.spread is not None
        table, contributions = found.spread.combine(table, p)
    return replace(found, contributions=contributions), table


def measure_again(found: Gradients, p: float, inv_scale: Tensor | None = None) -> Tensor:
    """The table of gradients that have been sorted out already."""
    if found.united is not None:
        return found.united.measure_again(found, p, inv_scale)
    if found.spread is None:
        return _measure_again(found, p, inv_scale, {})
    reduced = found.spread.reduced(found.tensors)
    return found.spread.combine(_measure_again(found, p, inv_scale, reduced), p)[0]


def _measure_again(
    found: Gradients, p: float, inv_scale: Tensor | None, reduced: Mapping[int, Tensor]
) -> Tensor:
    tensors: Sequence[Tensor] = found.tensors
    if reduced and found.spread is not None:
        places = found.spread.places()
        tensors = [reduced.get(place, each) for place, each in zip(places, tensors, strict=True)]
    devices = found.by_device()
    first = tensors[0].device
    parts = [
        backends.choose(device).measure(_select(tensors, rows), p, inv_scale).to(first)
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
    quick = backends.choose(listed.grads[0].device).quick_measure_units if listed.plain else None
    if quick is not None and listed.spread is None:
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
    return _clip_(listed, p, max_norm, None, False)[2] if result is None else result[1]


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
    return _clip_(listed, p, max_norm, inv_scale, skip)


def _quick_clip_(
    listed: Listed, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> Clipped | None:
    """What a backend makes of the list as it is, if it takes it so."""
    if listed.spread is not None:
        return None
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_clip_):
        return quick(listed.grads, p, max_norm, inv_scale, skip)
    return None


def _clip_(
    listed: Listed, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> tuple[Gradients, Tensor, Tensor, Tensor]:
    if listed.spread is not None:
        found, table = _measure_spread(listed, listed.spread, p, inv_scale)
    else:
        found = sort_out(listed)
        table = measure_again(found, p, inv_scale)
    total = tables.total_norm(table, p)
    coef, factor = tables.factors(table, total, max_norm, inv_scale, skip)
    scale_(found, factor)
    return found, table, total.to(tables.result_dtype(found.tensors)), coef


def rescale_(listed: Listed, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d."""
    if listed.plain and (quick := backends.choose(listed.grads[0].device).quick_scale_):
        if quick(listed.grads, coef):
            return
    scale_(sort_out(listed), coef)


@torch.no_grad()
def scale_(found: Gradients, coef: Tensor) -> None:
    """Multiply the gradients in place by `coef`, float64, 0-d or ``[n]``."""
    if coef.dim() == 0 and tables.peek(coef) == 1:
        return
    if found.united is not None and coef.dim() > 0:
        coef = found.united.own(coef)
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
