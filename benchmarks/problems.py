"""Gradients that are left alone and clipped in turn, without a copy of them to restore.

To double what a clip has halved is exact, and brings the norm back to twice the threshold whatever
the rounding was: so it does not drift, however often. The gradients may lie on any device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip.benchmarking.workloads import MEAN_SQUARE, gradients

BLOCK = 1 << 20  # elements that longer tensors repeat
CLOSE = 0.25  # relatively: torch's norms of half types are some percent off

Operation = Callable[[Tensor, Tensor], object]

# torch's own operations on a tensor and a target of its size: what memory gives.
RATES: dict[str, Operation] = {
    "sum": lambda source, target: source.sum(),
    "aminmax": lambda source, target: source.aminmax(),
    "mul_": lambda source, target: source.mul_(1.0),
    "fill_": lambda source, target: target.fill_(1.0),
    "copy_": lambda source, target: target.copy_(source),
}


@dataclass(frozen=True)
class Problem:
    """Arguments of one `clip_grad_norm_` call; the first element of the first and of the last
    gradient is 1 before it."""

    parameters: list[torch.nn.Parameter]
    gradients: list[Tensor]
    max_norm: float
    clips: bool

    @property
    def n_bytes(self) -> int:
        return sum(grad.nbytes for grad in self.gradients)

    def settle(self, name: str, norm: Tensor) -> None:
        """What `name` did is checked, and undone where it clipped; not to be timed."""
        ends = (self.gradients[0], self.gradients[-1])
        left = [abs(grad.view(-1)[0].item()) for grad in ends]
        share = 0.5 if self.clips else 1.0
        right = all(abs(one / share - 1) < CLOSE for one in left)
        if not right or (float(norm) > self.max_norm) != self.clips:
            raise RuntimeError(
                f"{name} returned a norm of {float(norm):g} for max_norm={self.max_norm:g} and "
                f"left {left[0]:g} and {left[1]:g} of the gradients, which are to be "
                f"{'halved' if self.clips else 'left alone'}"
            )
        if self.clips:
            torch._foreach_mul_(self.gradients, 2.0)


def both(grads: Sequence[Tensor]) -> tuple[Problem, Problem]:
    """The same gradients left alone (the threshold is twice their norm), and clipped to half.

    They hold values as `fastclip.benchmarking.workloads.gradients` makes them.
    """
    parameters = []
    for grad in grads:
        parameters.append(torch.nn.Parameter(torch.empty_like(grad)))
        parameters[-1].grad = grad
    for grad in (grads[0], grads[-1]):
        grad.view(-1)[0] = 1.0
    norm = math.sqrt(MEAN_SQUARE * sum(grad.numel() for grad in grads))
    alone = Problem(parameters, list(grads), 2 * norm, clips=False)
    return alone, Problem(parameters, alone.gradients, norm / 2, clips=True)


def made_on(
    device: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Gradients, one a shape and dtype, made where they are to be."""
    blocks = {dtype: gradients([(BLOCK,)], dtype)[0].to(device) for dtype in set(dtypes)}
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        made.append(torch.empty(shape, dtype=dtype, device=device))
        for piece in made[-1].view(-1).split(BLOCK):
            piece.copy_(blocks[dtype][: piece.numel()])
    return made
