"""The loss spike in half precision, on a model of one weight.

One bad input makes float16 overflow, which a GradScaler notices and skips. bfloat16 has the range
of float32: nothing overflows, nothing is skipped, and the step destroys the weight, unless the
gradient is clipped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import fastclip

STEPS = 12
BAD_STEP = 6
BAD_INPUT = 100_000.0
LEARNING_RATE = 0.02
START = 0.25


class Mode(NamedTuple):
    name: str
    dtype: torch.dtype  # of the linear layer under autocast
    max_norm: float  # inf measures only
    scaled: bool  # with a GradScaler


class Row(NamedTuple):
    mode: str
    step: int
    loss: float
    norm: float  # of the gradient, before clipping
    weight: float  # after the step
    skipped: bool  # the GradScaler skipped the step


MODES = (
    Mode("fp16 + GradScaler", torch.float16, float("inf"), True),
    Mode("bf16, no clipping", torch.bfloat16, float("inf"), False),
    Mode("bf16 + clip 1.0", torch.bfloat16, 1.0, False),
)


def run(mode: Mode) -> list[Row]:
    """Trains the one weight towards 0 in the given mode; one row a step."""
    weight = torch.full((1, 1), START, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=LEARNING_RATE)
    # Disabled, it passes everything through. The default initial scale, 65536, is the one that
    # people train with; any power of two that does not overflow here gives the same values.
    scaler = torch.amp.GradScaler("cpu", enabled=mode.scaled)
    return [_step(mode, step, weight, optimizer, scaler) for step in range(STEPS)]


def _step(
    mode: Mode,
    step: int,
    weight: Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> Row:
    inputs = torch.full((1, 1), BAD_INPUT if step == BAD_STEP else 1.0)
    with torch.amp.autocast("cpu", mode.dtype):
        output = torch.nn.functional.linear(inputs, weight)
    loss = output.float().square().mean()

    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = fastclip.clip_grad_norm_([weight], mode.max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < scale  # it backs off when, and only when, it skipped
    return Row(mode.name, step, loss.item(), norm.item(), weight.item(), skipped)
