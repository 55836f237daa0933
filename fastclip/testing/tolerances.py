"""The one tolerance table, in relative errors and units in the last place (ulp).

The norm's share comes from the design; what a multiplication may cost follows from its roundings.
"""

import math

import torch
from torch import Tensor

EPS64 = torch.finfo(torch.float64).eps

# Total norm: what is promised for float32 and half gradients of any magnitude. float64 gradients
# are added in float64: 65,537 equal elements in runs of 2,048 cost at most 2048 * 2**-53 = 2e-13.
NORM = {torch.float32: 1e-6, torch.float64: 1e-12}

# MAX_ABS and the counts are exact; a complex magnitude is the float64 root of a sum of squares:
# three roundings of half an ulp, and the reference's own.
MAX_ABS = 0.0
MAX_ABS_COMPLEX = 4 * EPS64
# Unscaling by what is not a power of two: one float32 rounding of the element times inv_scale.
UNSCALED = 2.0**-24

# scale_, coefficient given, float32: half an ulp of the coefficient is up to one ulp of the
# product, and half for the product's own rounding. float64: the product's rounding alone.
# Halves: half an ulp, and 1/2**13 (bfloat16) or less for having passed through float32 before.
SCALE_ULP = {
    torch.float32: 1.5,
    torch.float64: 0.5,
    torch.bfloat16: 0.51,
    torch.float16: 0.51,
}
# a float32 coefficient below 2**-126 is a denormal: it has an absolute error of half its last place
COEF_ABSOLUTE = 2.0**-150


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex number's parts; any other dtype itself."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def result_dtype(grads: list[Tensor]) -> torch.dtype:
    """The dtype of norms: float64 if any gradient is float64 or complex128, else float32."""
    wide = any(real_dtype(grad.dtype) == torch.float64 for grad in grads)
    return torch.float64 if wide else torch.float32


def norm(dtype: torch.dtype) -> float:
    """The relative error allowed to a norm over gradients of the dtype."""
    return NORM[torch.float64 if real_dtype(dtype) == torch.float64 else torch.float32]


def power(dtype: torch.dtype, p: float) -> float:
    """The relative error allowed to POWER: the root divides it by p; 0 and inf are exact."""
    if p == 0 or math.isinf(p):
        return MAX_ABS_COMPLEX if dtype.is_complex else 0.0
    return abs(p) * norm(dtype)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of the dtype's numbers at float64 values, denormals included."""
    info = torch.finfo(real_dtype(dtype))
    _, exponent = torch.frexp(value.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.ones_like(value), exponent - 1) * info.eps
