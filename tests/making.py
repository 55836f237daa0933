"""Parameters with given gradients, and a record of what the gradients were."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip.testing.compare import bitwise_equal


def parameters(*grads: Tensor | None) -> list[Tensor]:
    """One parameter per gradient; None makes a parameter without one."""
    made = []
    for grad in grads:
        if grad is None:
            made.append(torch.zeros(3, requires_grad=True))
            continue
        learns = grad.is_floating_point() or grad.is_complex()
        size = () if grad.dim() == 0 else grad.shape
        # an empty placeholder expanded to the shape: the parameter's own memory does not matter
        parameter = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(size)
        parameter = parameter.clone() if grad.is_sparse else parameter.detach()
        parameter.requires_grad_(learns)
        parameter.grad = grad
        made.append(parameter)
    return made


def floats(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A one-dimensional tensor."""
    return torch.tensor(values, dtype=dtype)


def snapshot(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies, strides and all, to compare with later."""
    return [None if grad is None else grad.detach().clone() for grad in grads]


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that are there."""
    return [p.grad for p in params if p.grad is not None]


def unchanged(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> bool:
    """Bitwise as they were, and as many."""
    pairs = zip(now, before, strict=True)
    return all(
        a is b or (a is not None and b is not None and bitwise_equal(a, b)) for a, b in pairs
    )
