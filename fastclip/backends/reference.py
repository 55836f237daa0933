"""The backend in plain PyTorch, on any device with float64: the specification of the others.

Works in float64 a piece at a time, so that memory stays small, and on the device throughout.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.backends.contract import Backend

PIECE = 1 << 16  # elements: a piece in float64 (512 KiB) stays in a second-level cache


@torch.no_grad()
def measure(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    """The table of `grads`: dense or strided tensors, real or complex, on one device."""
    if not grads:
        return tables.empty(p, 0, torch.device("cpu"))
    table = torch.stack([_row(grad, p) for grad in grads])
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
        for piece in _pieces(_real(grad)):
            piece.copy_(piece.to(wide) * factor)


@torch.no_grad()
def clip_(
    grads: Sequence[Tensor], p: float, max_norm: float | Tensor, inv_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Measure, and rescale to `max_norm`: the table, the total norm (0-d) and `coef` (0-d)."""
    table = measure(grads, p, inv_scale)
    total = tables.total_norm(table, p)
    coef = tables.coefficient(total, max_norm)
    scale_(grads, coef if inv_scale is None else coef * inv_scale.to(coef.device))
    return table, total.to(tables.result_dtype(grads)), coef


def _row(grad: Tensor, p: float) -> Tensor:
    rows = [_piece_row(_magnitude(piece), p) for piece in _pieces(grad) if piece.numel() > 0]
    return tables.combine(torch.stack(rows), p) if rows else tables.empty(p, 1, grad.device)[0]


def _piece_row(x: Tensor, p: float) -> Tensor:
    return torch.stack(
        [
            _power(x, p),
            torch.where(x.isfinite(), x, 0.0).amax(),
            x.isnan().sum(),
            x.isinf().sum(),
            (x == 0).sum(),
        ]
    )


def _power(x: Tensor, p: float) -> Tensor:
    if p == math.inf:
        return x.amax()
    if p == -math.inf:
        return x.amin()
    if p == 0:
        return (x != 0).sum().to(torch.float64)
    return (x * x if p == 2 else x**p).sum()


def _magnitude(x: Tensor) -> Tensor:
    """``abs(x)`` in float64; a complex number with an infinite part is infinite, else NaN wins."""
    if not x.is_complex():
        return x.to(torch.float64).abs()
    real, imag = _real(x).to(torch.float64).unbind(-1)
    return torch.where(real.isinf() | imag.isinf(), math.inf, torch.hypot(real, imag))


def _real(x: Tensor) -> Tensor:
    """A view of complex numbers as pairs, of others as they are."""
    if not x.is_complex():
        return x
    return torch.view_as_real(x.conj() if x.is_conj() else x)  # a lazy conjugate cannot be viewed


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1).split(PIECE) if x.is_contiguous() else (x,)


def provide() -> Backend:
    return Backend("reference", None, "plain PyTorch in float64", measure, scale_, clip_)
