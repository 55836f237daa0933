"""A few elements of a gradient, by which `overlap` notices writes that leave no mark on it."""

import torch
from torch import Tensor

SAMPLES = 16


def spread(gradient: Tensor) -> Tensor:
    """A view of a few elements, as they lie in memory."""
    n = gradient.numel()
    return gradient.as_strided((min(n, SAMPLES),), (max(n // SAMPLES, 1),))


def telling(elements: Tensor) -> Tensor:
    """Where a multiplication shows."""
    return elements.isfinite() & elements.ne(0)


def place(gradient: Tensor) -> Tensor | None:
    """Of an element where a multiplication shows, if there is one; None if `spread` has one."""
    if gradient.device.type == "cpu" and telling(spread(gradient)).any():
        return None
    memory = gradient.as_strided((gradient.numel(),), (1,))
    return telling(memory).view(torch.uint8).argmax(0, keepdim=True)


def sample(gradient: Tensor, place: Tensor | None) -> Tensor:
    """A copy of the elements of `spread` and of the one at `place`."""
    if place is None:
        return spread(gradient).clone()
    memory = gradient.as_strided((gradient.numel(),), (1,))
    return torch.cat([spread(gradient), memory.index_select(0, on(gradient.device, place))])


def on(device: torch.device, kept: Tensor) -> Tensor:
    """What a hook has made, for use on the current stream of `device`."""
    if kept.is_cuda:
        kept.record_stream(torch.cuda.current_stream(kept.device))
    return kept.to(device)
