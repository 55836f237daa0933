"""The functions of `fastclip.passes` as calls of operators: what a trace records.

While torch.compile or make_fx traces, gradients have no memory that could be looked at: all that
is sorted out here is that no tensor object comes twice. The operators do the rest when they run.
They have no derivative: gradients may require one (torch.func.grad), and are rescaled without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip import ops
from fastclip import table as tables
from fastclip.backends import units
from fastclip.gradients import Gradients, Listed


def sort_out(listed: Listed) -> Gradients:
    return Gradients.of_listed(listed.distinct())


def measure(listed: Listed, p: float, inv_scale: Tensor | None = None) -> tuple[Gradients, Tensor]:
    found = sort_out(listed)
    return found, measure_again(found, p, inv_scale)


@torch.no_grad()
def measure_again(found: Gradients, p: float, inv_scale: Tensor | None = None) -> Tensor:
    return ops.measure(found.tensors, p, inv_scale)


def measure_units(
    listed: Listed, p: float, inv_scale: Tensor | None = None
) -> tuple[Gradients, Tensor]:
    return measure(listed, p, inv_scale)


def unit_norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(map(units.unit_norms, tensors)))


def clip_(listed: Listed, p: float, max_norm: float | Tensor) -> Tensor:
    return clip_measured_(listed, p, max_norm)[2]


@torch.no_grad()
def clip_measured_(
    listed: Listed,
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> tuple[Gradients, Tensor, Tensor, Tensor]:
    found = sort_out(listed)
    if not isinstance(max_norm, Tensor):
        max_norm = tables.limit(max_norm, torch.device("cpu"))
    return found, *ops.clip_(found.tensors, p, max_norm, inv_scale, skip)


def rescale_(listed: Listed, coef: Tensor) -> None:
    scale_(sort_out(listed), coef)


@torch.no_grad()
def scale_(found: Gradients, coef: Tensor) -> None:
    ops.scale_(found.tensors, coef)


def scale_units_(gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    units.scale_units_(gradients, factors)
