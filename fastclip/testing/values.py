"""Values that have broken gradient norms: zeros, non-finite elements, extreme magnitudes."""

from collections.abc import Callable

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
Pattern = Callable[[torch.Generator], list[Tensor]]  # float64 tensors, rounded to the case's dtype


def normal(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal values on the CPU, drawn in double precision whatever the dtype."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def build(
    pattern: Pattern, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    return [value.to(dtype).to(device) for value in pattern(generator)]


def _constant(value: float) -> Pattern:
    return lambda generator: [torch.full((n,), value, dtype=torch.float64) for n in (1, 193, 5000)]


def _around(magnitude: float) -> Pattern:
    """Both signs, between half the magnitude and all of it."""

    def pattern(generator: torch.Generator) -> list[Tensor]:
        uniform = torch.rand(5001, generator=generator, dtype=torch.float64) / 2 + 0.5
        uniform[::3] *= -1
        return [uniform * magnitude, uniform[:3] * magnitude]

    return pattern


def _with(*specials: float) -> Pattern:
    """Normal values, every 40th element replaced by the next special one."""

    def pattern(generator: torch.Generator) -> list[Tensor]:
        value = normal(generator, (1000,), torch.float64)
        for i, special in enumerate(specials):
            value[40 * i + 7 :: 40 * len(specials)] = special
        return [normal(generator, (50,), torch.float64), value]

    return pattern


def _alternating(*parts: float) -> Pattern:
    """The parts in turn within one tensor, and each in a tensor of its own."""

    def pattern(generator: torch.Generator) -> list[Tensor]:
        together = torch.tensor(parts, dtype=torch.float64).repeat(700)
        return [together, *(torch.full((70,), part, dtype=torch.float64) for part in parts)]

    return pattern


def _swamped(generator: torch.Generator) -> list[Tensor]:
    """One large square that swallows every later one in a single float32 accumulator."""
    return [torch.cat([torch.tensor([1e4]), torch.full((65536,), 0.9)]).double()]


def _outlier_at_end(outlier: float, rest: float) -> Pattern:
    """A long stretch of one magnitude, then one element of another: only the last run overflows."""
    return lambda generator: [
        torch.cat([torch.full((9000,), rest), torch.tensor([outlier])]).double()
    ]


_COMMON: dict[str, Pattern] = {
    "zeros": _constant(0.0),
    "negative-zeros": _constant(-0.0),
    "some-zeros": _with(0.0, -0.0),
    "nan": _with(NAN),
    "inf": _with(INF),
    "negative-inf": _with(-INF),
    "both-infs": _with(INF, -INF),
    "nan-inf-zero": _with(NAN, INF, 0.0, -INF, -0.0),
    "all-nan": _constant(NAN),
    "all-inf": _constant(INF),
    # a third is not exact in any dtype: rounding errors of equal elements all point the same way
    "constant-third": _constant(1 / 3),
}
_MAGNITUDES: dict[torch.dtype, tuple[float, ...]] = {
    # 1e-20: its square is a denormal float32, half its digits lost; a sum of many is normal again
    torch.float32: (1e-44, 1e-38, 1e-23, 1e-20, 1.2e-19, 1e-18, 1.5e19, 1e20, 3e38),
    torch.bfloat16: (1e-40, 1e-38, 1e-23, 1e-20, 1.2e-19, 1.5e19, 1e20, 3e38),
    torch.float16: (6e-8, 1e-6, 6e-5, 250.0, 65504.0),
    torch.float64: (1e-150, 1e-44, 1e-23, 1e20, 1e150),
}


def patterns(dtype: torch.dtype) -> dict[str, Pattern]:
    """Every named pattern that makes sense in the dtype."""
    info = torch.finfo(dtype)
    found = dict(_COMMON)
    for magnitude in _MAGNITUDES[dtype]:
        found[f"around-{magnitude:g}"] = _around(magnitude)
    if dtype != torch.float64:  # float64's own extremes have powers beyond float64
        found["largest"] = _constant(info.max)
        found["smallest"] = _constant(info.smallest_normal * info.eps)
        found["denormals"] = _around(info.smallest_normal)
        found["huge-beside-tiny"] = _alternating(info.max, info.smallest_normal, 1.0)
        found["huge-and-inf"] = _alternating(info.max, INF, 1.0)
        found["huge-and-nan"] = _alternating(info.max, NAN, 1.0)
    if dtype in (torch.float32, torch.bfloat16):
        found["squares-1e40-beside-1e-40"] = _alternating(1e20, 1e-20)
        found["many-1e-20-beside-one-2e-19"] = _outlier_at_end(2e-19, 1e-20)
        found["one-3e38-at-the-end"] = _outlier_at_end(3e38, 1e-3)
        found["one-1-after-1e-23"] = _outlier_at_end(1.0, 1e-23)
    if dtype == torch.float32:
        found["swamped"] = _swamped
    return found


def one_bad_at_every_lane(
    bad: float, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """67 tensors of 67 elements (vectors of every width and a tail): tensor i is bad at i only."""
    tensors = [normal(generator, (67,), dtype) for _ in range(67)]
    for i, tensor in enumerate(tensors):
        tensor[i] = bad
    return [tensor.to(device) for tensor in tensors]


def one_bad_at_borders(
    bad: float, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """One bad element first, last, and on both sides of each block border of 10,000 elements."""
    places = (0, 63, 64, 2047, 2048, 4095, 4096, 8191, 8192, 9999)
    tensors = [normal(generator, (10000,), dtype) for _ in places]
    for place, tensor in zip(places, tensors, strict=True):
        tensor[place] = bad
    return [tensor.to(device) for tensor in tensors]


def nan_payloads(
    dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """Quiet and signalling NaNs of both signs with the smallest and largest payloads."""
    bits = torch.finfo(dtype).bits
    integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    infinity = int(torch.tensor(INF, dtype=dtype).view(integer))
    sign = -(2 ** (bits - 1))
    mantissa = (1 << (bits - 1)) - 1 - infinity
    payloads = [infinity + p for p in (1, mantissa // 2 + 1, mantissa)]
    patterns = torch.tensor(payloads + [sign + p for p in payloads], dtype=integer)
    value = normal(generator, (100,), dtype)
    value.view(integer)[3:93:15] = patterns
    return [value.to(device)]


def complex_parts(
    dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """Every pair of special real and imaginary parts, one tensor each, and all of them together."""
    parts = torch.tensor([0.0, -0.0, 1.5, NAN, INF, -INF], dtype=torch.float64)
    real, imaginary = (grid.reshape(-1) for grid in torch.meshgrid(parts, parts, indexing="ij"))
    together = torch.complex(real, imaginary).to(dtype).to(device)
    return [*together.clone().split(1), together]


def huge_complex(generator: torch.Generator, device: torch.device) -> list[Tensor]:
    """Finite numbers whose magnitude is beyond float32: they count as finite."""
    huge = torch.full((70,), complex(3e38, -3e38), dtype=torch.complex64)
    tiny = torch.full((70,), complex(1e-44, 1e-44), dtype=torch.complex64)
    return [huge.to(device), tiny.to(device)]


def every_half(
    dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """All 65,536 bit patterns: the finite ones in one tensor, the others in a second."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.isfinite(every)
    return [every[finite].to(device), every[~finite].to(device)]
