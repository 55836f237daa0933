"""Which memory the elements of a strided tensor are in."""

from math import prod

import torch
from torch import Tensor


def without_expansion(x: Tensor) -> Tensor:
    """One element of each expanded (stride 0) dimension."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def overlaps(x: Tensor) -> bool:
    """Whether two elements of x share memory."""
    extent = 1  # of the dimensions so far, those of smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < extent:
            break  # not proof of an overlap: the elements may interleave
        extent += (size - 1) * stride
    else:
        return False
    if prod(x.shape) == 0:
        return False
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(x.stride(), x.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return offsets.unique().numel() < offsets.numel()
