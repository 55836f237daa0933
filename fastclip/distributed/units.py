"""Norms of the units of DTensors: of the slices of the whole tensor along its first dimension, or
of all of one that has fewer than two.

Processes between which a mesh divides the first dimension have different units. Between which it
divides another one, they have parts of the same units, in the same order: along these dimensions of
the mesh sums of squares are added, and along no other. So nothing travels of units that a process
has whole, and no replica is added to another.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastclip import passes
from fastclip.backends import units as by_unit
from fastclip.distributed import combine
from fastclip.distributed.layouts import Layout, Layouts, alike, divided_dim
from fastclip.rules.contract import Measured, UnsuitableGradient


def of_whole(
    measured: Measured,
    parameters: Sequence[Tensor],
    held: Sequence[Tensor],
    of_grads: Sequence[Layout | None],
    present: Sequence[bool],
) -> Measured:
    """`measured` with `whole_units`; rows without a gradient have an empty parameter as well.

    `held` is what this process has of `parameters`, `of_grads` how the gradients are laid out. One
    collective for each set of processes that have parts of the same units. What these exchange
    depends on the parameters alone; raises `UnsuitableGradient` afterwards, for gradients that are
    not laid out as their parameters.
    """
    grads = measured.gradients
    layouts = Layouts()
    of_parameters = [layouts.of(each) if isinstance(each, DTensor) else None for each in parameters]
    norms = _held_norms(grads, held)
    for group, rows in _sharing(of_parameters, parameters):
        device = norms[rows[0]].device
        parts = [norms[row].square().to(device) for row in rows]
        counts = [part.shape[1] for part in parts]
        sums = combine.sum_of(torch.cat(parts, 1), group).sqrt()
        for row, part in zip(rows, sums.split(counts, 1), strict=True):
            norms[row] = part.to(norms[row].device)
    own = list(held)
    for row, grad in enumerate(grads):
        if not present[row]:
            own[row], norms[row] = grad, norms[row].new_zeros(2, by_unit.count(grad))
        elif not alike(of_grads[row], of_parameters[row]):
            raise UnsuitableGradient(row, _apart(of_grads[row], of_parameters[row]))
    return measured._replace(parameters=own, whole_units=norms)


def _held_norms(grads: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """Of the parts that this process has, ``[2, units]`` for each parameter."""
    norms: dict[int, Tensor] = {}
    for device in dict.fromkeys(each.device for each in grads):
        rows = [row for row, each in enumerate(grads) if each.device == device]
        counts = [by_unit.count(held[row]) for row in rows]
        both = [
            passes.unit_norms([_able(tensors[row], held[row]) for row in rows])
            for tensors in (grads, held)
        ]
        norms |= zip(rows, torch.stack(both).split(counts, 1), strict=True)
    return [norms[row] for row in range(len(grads))]


def _able(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, or zeros with as many units as `parameter` for what has other units or no norms: a
    gradient that is not there, or that a rule refuses."""
    if tensor.shape == parameter.shape and not tensor.is_complex():
        return tensor
    return parameter.new_zeros(by_unit.count(parameter), 1, dtype=torch.float32)


def _sharing(
    layouts: Sequence[Layout | None], parameters: Sequence[Tensor]
) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """The sets of processes that have parts of the same units, and the rows of these, in the order
    in which they first come."""
    sets: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[int]]] = {}
    for row, (layout, parameter) in enumerate(zip(layouts, parameters, strict=True)):
        if layout is None or not layout.ranks:
            continue
        for dim, divided in enumerate(map(divided_dim, layout.placements)):
            whole = divided is None or (divided == 0 and parameter.dim() > 1)
            if not whole and layout.mesh.size(dim) > 1:
                group = layout.mesh.get_group(dim)
                ranks = tuple(dist.get_process_group_ranks(group))
                sets.setdefault(ranks, (group, []))[1].append(row)
    return list(sets.values())


def _apart(of_grad: Layout | None, of_parameter: Layout | None) -> str:
    grad, parameter = (
        "no DTensor" if layout is None else f"a DTensor with placements {layout.placements}"
        for layout in (of_grad, of_parameter)
    )
    return (
        f"is {grad}, and its parameter is {parameter}: norms by unit need both laid out alike on "
        "the same mesh; take a rule that clips whole tensors (AdaGC) or the global norm"
    )
