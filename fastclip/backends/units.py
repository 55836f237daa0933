"""The reference for norms and rescaling by unit: the slices of a tensor along its first dimension.

A tensor of fewer than two dimensions is one unit. Plain PyTorch, on any device with float64.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastclip import table as tables

# Elements that are in a wider dtype at a time, as in the reference backend.
PIECE = {"cpu": 1 << 16}
PIECE_ELSEWHERE = 1 << 24

WIDTHS = (32, 128)  # elements whose squares may be added in float32
# A sum of squares below this norm's may have lost some to underflow; the one of this norm has lost
# 128 * 2^-150 at most, 2^-51 of it.
SMALLEST = 2.0**-46


def count(x: Tensor) -> int:
    """The number of units."""
    return x.shape[0] if x.dim() > 1 else 1


def unit_norms(x: Tensor) -> Tensor:
    """The 2-norm of each unit of a real tensor of any strides, float64 ``[units]``."""
    x = _by_unit(x)
    short = _from_short_sums(x)
    return _exact(x) if short is None else short


def _from_short_sums(x: Tensor) -> Tensor | None:
    """The norms from float32 sums of up to 128 squares, on the CPU, where torch adds these many
    times as fast as in float64: in 8 lanes or more, so with 20 roundings at most, which a norm has
    half of, 6e-7.

    None for other layouts and devices, and where such a sum has left the range of float32.
    """
    if x.device.type != "cpu" or x.dtype in tables.WIDE or not x.is_contiguous():
        return None
    least, most = WIDTHS
    width = math.gcd(math.prod(x.shape[1:]), most)
    if width < least or x.numel() == 0:
        return None
    rows = x.view(-1, width)
    parts = [rows] if x.dtype == torch.float32 else rows.split(PIECE["cpu"] // width)
    sums = torch.cat([torch.linalg.vector_norm(part, 2, -1, dtype=torch.float32) for part in parts])
    low, high = map(tables.peek, sums.aminmax())
    if low is None or high is None or not high < math.inf:  # NaN too
        return None
    if low < SMALLEST:
        not_zero = (rows.amax(-1) > 0) | (rows.amin(-1) < 0)
        if tables.peek(((sums < SMALLEST) & not_zero).any()):
            return None
    return sums.view(len(x), -1).to(torch.float64).square_().sum(1).sqrt_()


def _exact(x: Tensor) -> Tensor:
    pieces = list(_pieces(x))
    if len(pieces) == 1:
        return _norms(x)
    power = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for first, piece in pieces:
        power.narrow(0, first, len(piece)).add_(_norms(piece).square_())
    return power.sqrt_()


@torch.no_grad()
def scale_units_(gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each unit in place by its own factor, float64 ``[units]``.

    The product is made in float32 (float64 for float64 gradients) and rounded once. A gradient all
    of whose factors are 1 is not written on the CPU; elsewhere the host does not know them, and
    the multiplication by 1 leaves every value as it is.
    """
    for gradient, factor in zip(gradients, factors, strict=True):
        wide = torch.float64 if gradient.dtype in tables.WIDE else torch.float32
        factor = factor.to(gradient.device, wide)
        if tables.peek((factor == 1).all()):
            continue
        # The memory, not what a negated view shows of it: copy_ to one of halves drops the sign.
        x = _by_unit(torch._neg_view(gradient) if gradient.is_neg() else gradient)
        column = factor.view(-1, *[1] * (x.dim() - 1))
        if gradient.dtype == wide:
            x.mul_(column)
            continue
        for first, piece in _pieces(x):
            piece.copy_(piece.to(wide) * column.narrow(0, first, len(piece)))


def _by_unit(x: Tensor) -> Tensor:
    """A view whose first dimension counts the units; there is always a second one."""
    if x.dim() >= 2:
        return x
    return x[None] if x.dim() == 1 else x[None, None]


def _norms(x: Tensor) -> Tensor:
    # With a float64 copy of all of x, where there are dimensions to keep: hence the pieces.
    return torch.linalg.vector_norm(x, 2, dim=tuple(range(1, x.dim())), dtype=torch.float64)


def _pieces(x: Tensor, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Views of about `PIECE` elements at most that make up x, each with its first unit's number."""
    size = PIECE.get(x.device.type, PIECE_ELSEWHERE)
    if x.numel() <= size:
        yield first, x
        return
    # Several units while one of them is small enough, else parts of one.
    dim = 0 if len(x) > 1 else max(range(1, x.dim()), key=lambda d: x.shape[d])
    step = max(1, x.shape[dim] * size // x.numel())
    for number, part in enumerate(x.split(step, dim)):
        yield from _pieces(part, first + number * step if dim == 0 else first)
