"""Gradients that are left alone and clipped in turn, without a copy of them to restore.

To double what a clip has halved is exact, and brings the norm back to twice the threshold whatever
the rounding was: so it does not drift, however often. The gradients may lie on any device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastclip.benchmarking.workloads import (
    BLOCK,
    MEAN_SQUARE,
    Clip,
    Shape,
    gradients,
    require_right,
)

Operation = Callable[[Tensor, Tensor], object]

# torch's own operations on a tensor and a target of its size: what memory gives.
RATES: dict[str, Operation] = {
    "sum": lambda source, target: source.sum(),
    "aminmax": lambda source, target: source.aminmax(),
    "mul_": lambda source, target: source.mul_(1.0),
    "fill_": lambda source, target: target.fill_(1.0),
    "copy_": lambda source, target: target.copy_(source),
}


def both(grads: Sequence[Tensor]) -> tuple[Clip, Clip]:
    """The same gradients left alone (the threshold is twice their norm), and clipped to half.

    They hold values as `gradients` makes them; their first elements become 1, by which a
    `Clip` tells whether it was clipped.
    """
    parameters = []
    for grad in grads:
        parameters.append(torch.nn.Parameter(torch.empty_like(grad)))
        parameters[-1].grad = grad
    for grad in (grads[0], grads[-1]):
        grad.view(-1)[0] = 1.0
    norm = math.sqrt(MEAN_SQUARE * sum(grad.numel() for grad in grads))
    alone = Clip(parameters, 2 * norm, 2.0, False, 1.0, None)
    restore = partial(torch._foreach_mul_, list(grads), 2.0)
    return alone, replace(alone, max_norm=norm / 2, clips=True, restore=restore)


def settle(name: str, problem: Clip, norm: Tensor) -> None:
    """What `name` did is checked, and undone where it clipped; not to be timed."""
    require_right(name, problem, norm)
    if problem.restore is not None:
        problem.restore()


def made_on(device: str, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Gradients of `shapes`, made where they are to be; the `dtypes` take turns."""
    blocks = [gradients([(BLOCK,)], dtype)[0].to(device) for dtype in dtypes]
    made = []
    for place, shape in enumerate(shapes):
        block = blocks[place % len(blocks)]
        made.append(torch.empty(shape, dtype=block.dtype, device=device))
        for piece in made[-1].view(-1).split(BLOCK):
            piece.copy_(block[: piece.numel()])
    return made
