"""Errors in units of tolerance: at most 1 is right, infinity is a wrong NaN, infinity or count."""

import math

import torch
from torch import Tensor

from fastclip.testing import tolerances
from fastclip.testing.reference64 import elements, scaled

POWER, MAX_ABS, NAN, INF, ZERO = range(5)


def relative(actual: float, expected: float, tolerance: float, absolute: float = 0.0) -> float:
    """|actual - expected| over what is allowed; NaN equals NaN and an infinity equals itself."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    allowed = tolerance * abs(expected) + absolute
    error = abs(actual - expected)
    if math.isnan(error) or math.isinf(error) or allowed == 0:
        return math.inf
    return error / allowed


def table_error(
    actual: Tensor, expected: Tensor, grads: list[Tensor], p: float, inv_scale: float = 1.0
) -> float:
    """The worst error of a statistics table; maxima are exact if inv_scale is a power of two."""
    rounding = 0.0 if math.frexp(inv_scale)[0] == 0.5 else tolerances.UNSCALED
    if actual.dtype != torch.float64 or actual.shape != expected.shape:
        return math.inf
    worst = 0.0
    rows = zip(actual.tolist(), expected.tolist(), grads, strict=True)
    for got, want, grad in rows:
        largest = tolerances.MAX_ABS_COMPLEX if grad.is_complex() else tolerances.MAX_ABS
        errors = [
            relative(got[POWER], want[POWER], tolerances.power(grad.dtype, p) + rounding),
            relative(got[MAX_ABS], want[MAX_ABS], largest + rounding),
            *(relative(got[column], want[column], 0.0) for column in (NAN, INF, ZERO)),
        ]
        worst = max(worst, *errors)
    return worst


def norm_tolerance(grads: list[Tensor]) -> float:
    """The loosest norm tolerance of the gradients: one float32 among them decides."""
    return max((tolerances.norm(grad.dtype) for grad in grads), default=0.0)


def norm_error(actual: Tensor, expected: float, grads: list[Tensor]) -> float:
    """The error of a returned norm, a 0-d tensor; a norm beyond its dtype's range must be inf."""
    dtype = tolerances.result_dtype(grads)
    if actual.dtype != dtype or actual.dim() != 0:
        return math.inf
    rounded = float(torch.tensor(expected, dtype=torch.float64).to(dtype))
    info = torch.finfo(dtype)
    spacing = (
        info.eps * info.smallest_normal
    )  # of the denormals: no result is nearer than half of it
    absolute = spacing if dtype == torch.float32 else 0.0
    return relative(float(actual), rounded, norm_tolerance(grads), absolute)


def scale_error(actual: Tensor, before: Tensor, coef: float, norm_share: float = 0.0) -> float:
    """The worst error of a gradient that was scaled in place.

    norm_share: relative error that the coefficient may carry from the norm it came from.
    """
    dtype = tolerances.real_dtype(actual.dtype)
    got, want, old = elements(actual), scaled(before, coef), elements(before)
    if got.is_complex():
        got, want, old = (torch.view_as_real(x).reshape(-1) for x in (got, want, old))
    if got.shape != want.shape:
        return math.inf
    rounded = want.to(dtype).double()
    wrong = (got != rounded) & ~(got.isnan() & rounded.isnan())
    if not bool(wrong.any()):
        return 0.0
    got, want, old = got[wrong], want[wrong], old[wrong]
    allowed = tolerances.SCALE_ULP[dtype] * tolerances.ulp(want, dtype) + norm_share * want.abs()
    if dtype != torch.float64:
        allowed += tolerances.COEF_ABSOLUTE * old.abs()
    error = (got - want).abs() / allowed
    return math.inf if bool(error.isnan().any()) else float(error.max())


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit of every logical element: signs of zeros and payloads of NaNs too."""
    if a.dtype != b.dtype or a.shape != b.shape or a.is_sparse != b.is_sparse:
        return False
    if a.is_sparse:
        same = bool(torch.equal(a._indices(), b._indices()))
        return same and bitwise_equal(a._values(), b._values())
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(x: Tensor) -> Tensor:
    # Into new memory: one element counts as contiguous with any stride, and view() wants stride 1.
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())
    return copy.reshape(-1).view(torch.uint8)


def coefficient_error(actual: Tensor, expected: float, norm_share: float) -> float:
    """The error of a coefficient that came from a norm: a float64 scalar."""
    if actual.dtype != torch.float64 or actual.dim() != 0:
        return math.inf
    return relative(float(actual), expected, norm_share + 2 * tolerances.EPS64)
