"""The backend in plain PyTorch, on any device with float64: the specification of the others.

Works in float64 a piece at a time, so that memory stays small, and on the device throughout: only
on the CPU, where a result costs no waiting, is anything decided on the host.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.backends.contract import Backend, Clipped, clip_in_passes

# Elements of a piece: on the CPU one in float64 (512 KiB) stays in a second-level cache; elsewhere
# every piece costs the launch of a dozen kernels.
PIECE = {"cpu": 1 << 16}
PIECE_ELSEWHERE = 1 << 24


@torch.no_grad()
def measure(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    """The table of `grads`: dense or strided tensors, real or complex, on one device."""
    if not grads:
        return tables.empty(p, 0, torch.device("cpu"))
    factor = None
    if inv_scale is not None and p not in tables.SCALABLE:
        factor = inv_scale.to(grads[0].device, torch.float64)
    table = torch.stack([_row(grad, p, factor) for grad in grads])
    return tables.unscale(table, p, inv_scale)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply each tensor by `coef`, 0-d or ``[n]``, in float32 (float64 for float64 tensors).

    On the CPU a coefficient of 1 writes nothing; elsewhere the host does not know it and the
    multiplication by 1 leaves every value as it is.
    """
    for grad, factor in zip(grads, coef.expand(len(grads)).unbind(), strict=True):
        wide = torch.float64 if grad.dtype in tables.WIDE else torch.float32
        factor = factor.to(grad.device, wide)
        if factor.device.type == "cpu" and factor == 1:
            continue
        # The memory, not what a negated view shows of it: copy_ to such a view of halves drops the
        # sign, and a factor is the same for both.
        real = torch._neg_view(grad) if grad.is_neg() else _real(grad)
        for piece in _pieces(real):
            piece.copy_(piece.to(wide) * factor)


@torch.no_grad()
def clip_(
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool = False,
) -> Clipped:
    """Measure, and rescale to `max_norm`; see `contract.Backend`."""
    return clip_in_passes(measure, scale_, grads, p, max_norm, inv_scale, skip)


def _row(grad: Tensor, p: float, factor: Tensor | None) -> Tensor:
    """The row of a tensor, with POWER of its elements times `factor`."""
    pieces = [_magnitude(piece) for piece in _pieces(grad) if piece.numel() > 0]
    rows = [_piece_row(piece, p, factor) for piece in pieces]
    return tables.combine(torch.stack(rows), p) if rows else tables.empty(p, 1, grad.device)[0]


def _piece_row(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    """The row of real numbers, whose sign does not matter."""
    power = _power(x, p, factor)
    largest, nan, inf = _extremes(x)
    zero = x.numel() - x.count_nonzero()
    return torch.stack([part.to(torch.float64) for part in (power, largest, nan, inf, zero)])


def _extremes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest finite magnitude, the number of NaN and that of infinite elements."""
    low, high = x.aminmax()
    largest = torch.maximum(low.abs(), high.abs())  # NaN if there is one
    if x.device.type == "cpu" and largest.isfinite():
        none = torch.zeros_like(largest)
        return largest, none, none
    finite = torch.where(x.isfinite(), x, 0.0).abs()
    return finite.amax(), x.isnan().sum(), x.isinf().sum()


def _power(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    if p in (1, 2):  # in float64 without a copy of x in it
        return torch.linalg.vector_norm(x, p, dtype=torch.float64) ** p
    if p == 0:
        return x.count_nonzero()
    size = x.to(torch.float64)
    size = size.abs() if factor is None else (size * factor).abs_()
    if math.isinf(p):
        return size.amax() if p > 0 else size.amin()
    return (size**p).sum()


def _magnitude(x: Tensor) -> Tensor:
    """Of complex numbers ``abs(x)`` in float64: infinite if a part is, else NaN if a part is."""
    if not x.is_complex():
        return x
    real, imag = _real(x).to(torch.float64).unbind(-1)
    return torch.where(real.isinf() | imag.isinf(), math.inf, torch.hypot(real, imag))


def _real(x: Tensor) -> Tensor:
    """A view of complex numbers as pairs, of others as they are."""
    if not x.is_complex():
        return x
    return torch.view_as_real(x.conj() if x.is_conj() else x)  # a lazy conjugate cannot be viewed


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Views of about `PIECE` elements at most that make up x."""
    size = PIECE.get(x.device.type, PIECE_ELSEWHERE)
    if x.is_contiguous():
        yield from x.view(-1).split(size)
    elif x.numel() <= size:
        yield x
    else:
        longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
        for part in x.split(max(1, x.shape[longest] * size // x.numel()), longest):
            yield from _pieces(part)


def provide() -> Backend:
    return Backend("reference", None, "plain PyTorch in float64", measure, scale_, clip_)
