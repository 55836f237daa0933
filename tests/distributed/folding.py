"""Fused optimizers of DTensors, and what they are handed: jobs for ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from fastclip import GradClipper
from tests import training
from tests.distributed import layouts, models

Tensors = dict[str, Tensor]

MAX_NORM = 0.25


class Folded(NamedTuple):
    """Of one rank, at each step."""

    written: list[bool]  # whether a gradient had been, when the optimizer began
    handed: list[float]  # what the optimizer was to multiply gradients by
    coef: list[float]
    skipped: list[bool]
    values: list[Tensors]  # of parameters, after the step
    expected: list[Tensors]  # where torch clips and steps


def sharded(size: int) -> nn.Module:
    model = models.net()
    layouts.shard(model, layouts.mesh(size))
    return model


def adamw(size: int) -> Folded:
    """Two steps; in the second the last rank has a NaN, and torch's takes none."""
    rank = torch.distributed.get_rank()
    ours, theirs = sharded(size), sharded(size)
    optimizer, other = (AdamW(model.parameters(), lr=0.01, fused=True) for model in (ours, theirs))
    clipper = GradClipper(ours, MAX_NORM)
    folded = Folded([], [], [], [], [], [])
    before: Tensors = {}

    def look(begun: Any, *_: Any) -> None:
        now = held_grads(ours)
        folded.written.append(training.differences(now, before) != [])
        scale = begun.grad_scale
        folded.handed.append(1.0 if scale is None else 1.0 / scale.item())

    optimizer.register_step_pre_hook(look)
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            layouts.backward(model, rank, size, step)
        if step == 1 and rank == size - 1:
            held_grads(ours)["first.weight"][0, 0] = torch.nan
        before.update({name: grad.clone() for name, grad in held_grads(ours).items()})
        stats = clipper.step(optimizer)
        if step == 0:
            nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
            other.step()
        folded.coef.append(stats.coef.item())
        folded.skipped.append(bool(stats.skipped))
        folded.values.append(layouts.held(ours))
        folded.expected.append(layouts.held(theirs))
    return folded


def sgd(size: int, with_clipper: bool) -> str:
    """What torch's fused SGD raises."""
    model = sharded(size)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    layouts.backward(model, torch.distributed.get_rank(), size)
    try:
        if with_clipper:
            GradClipper(model, MAX_NORM).step(optimizer)
        else:
            optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return ""


def held_grads(model: nn.Module) -> Tensors:
    return {
        name: layouts.local(models.grad_of(parameter))
        for name, parameter in model.named_parameters()
    }
