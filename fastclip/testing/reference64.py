"""What the answers are: one element at a time, in float64, on the CPU, with no regard for speed.

Written from the definitions and independent of every backend, the reference backend included.

>>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])], 2.0)
5.0
"""

import math

import torch
from torch import Tensor

EPS = 1e-6  # torch.nn.utils adds it to the norm before dividing


def elements(grad: Tensor) -> Tensor:
    """Every logical element of a gradient, as float64 or complex128 on the CPU, in one row."""
    grad = grad.detach().cpu()
    if grad.is_sparse:
        grad = grad.coalesce().values()
    wide = torch.complex128 if grad.is_complex() else torch.float64
    return grad.to(wide).reshape(-1)


def magnitudes(grad: Tensor) -> Tensor:
    """abs(x) of every element; a complex one with an infinite part is infinite, else NaN wins."""
    x = elements(grad)
    if not x.is_complex():
        return x.abs()
    size = torch.tensor([math.hypot(z.real, z.imag) for z in x.tolist()], dtype=torch.float64)
    return size


def power(size: Tensor, p: float) -> Tensor:
    """What the elements' magnitudes add up to before the root is taken."""
    if p == 0:
        return (size != 0).to(torch.float64).sum()  # NaN != 0: it counts
    if p == math.inf:
        return size.amax() if size.numel() else torch.tensor(0.0, dtype=torch.float64)
    if p == -math.inf:
        return size.amin() if size.numel() else torch.tensor(math.inf, dtype=torch.float64)
    return (size**p).sum()


def row(grad: Tensor, p: float) -> list[float]:
    """POWER, MAX_ABS, NAN, INF, ZERO of one gradient."""
    size = magnitudes(grad)
    finite = size[torch.isfinite(size)]
    return [
        float(power(size, p)),
        float(finite.amax()) if finite.numel() else 0.0,
        float(torch.isnan(size).sum()),
        float(torch.isinf(size).sum()),
        float((size == 0).sum()),
    ]


def table(grads: list[Tensor], p: float) -> Tensor:
    """The [n, 5] statistics table."""
    return torch.tensor([row(grad, p) for grad in grads], dtype=torch.float64).reshape(-1, 5)


def total_norm(grads: list[Tensor], p: float) -> float:
    """The norm of all elements as one vector; for p = 0 the number of those that are not zero."""
    size = torch.cat([magnitudes(grad) for grad in grads])
    total = power(size, p)
    if p not in (0, math.inf, -math.inf):
        total = total ** (1 / p)
    return float(total)


def coefficient(total: float, max_norm: float) -> float:
    """min(1, max_norm / (total + EPS)); 1 for an infinite max_norm, NaN for a NaN total."""
    if max_norm == math.inf:
        return 1.0
    if math.isnan(total):
        return math.nan
    return min(1.0, max_norm / (total + EPS))


def scaled(grad: Tensor, coef: float) -> Tensor:
    """Every element times coef, not rounded to the gradient's dtype; 1 changes nothing.

    A complex element is scaled part by part.
    """
    x = elements(grad)
    if coef == 1:
        return x
    if x.is_complex():
        return torch.view_as_complex(torch.view_as_real(x) * coef)
    return x * coef


def clipped(grads: list[Tensor], p: float, max_norm: float) -> list[Tensor]:
    """The elements of every gradient after clipping, not rounded to the gradients' dtypes."""
    coef = coefficient(total_norm(grads, p), max_norm)
    return [scaled(grad, coef) for grad in grads]
