"""The functions of `fastclip.passes` as calls of operators: what a trace records.

While torch.compile or make_fx traces, gradients have no memory that could be looked at: all that
is sorted out here is that no tensor object comes twice. The operators do the rest when they run.
"""

import torch
from torch import Tensor

from fastclip import ops
from fastclip.gradients import Gradients, Listed


def sort_out(listed: Listed) -> Gradients:
    return Gradients.of_listed(listed.distinct())


def measure(listed: Listed, p: float) -> tuple[Gradients, Tensor]:
    found = sort_out(listed)
    return found, ops.measure(found.tensors, p)


def clip_(listed: Listed, p: float, max_norm: float | Tensor) -> Tensor:
    if not isinstance(max_norm, Tensor):
        max_norm = torch.full((), max_norm, dtype=torch.float64, device="cpu")
    return ops.clip_(sort_out(listed).tensors, p, max_norm)[1]


def rescale_(listed: Listed, coef: Tensor) -> None:
    scale_(sort_out(listed), coef)


def scale_(found: Gradients, coef: Tensor) -> None:
    ops.scale_(found.tensors, coef)
