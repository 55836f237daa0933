"""The total norm is within 1e-6 of float64 on fifty million elements and at every magnitude."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip.backends import Backend
from fastclip.testing import tolerances
from fastclip.testing.variants import Variant

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
N = 50_000_000
CHUNK = 1 << 20


def expected(x: Tensor) -> dict[float, float]:
    """The norms of order 1, 2 and infinity: chunks in float64, their sums exactly rounded."""
    chunks = [chunk.double().abs() for chunk in x.split(CHUNK)]
    return {
        1.0: math.fsum(float(chunk.sum()) for chunk in chunks),
        2.0: math.sqrt(math.fsum(float((chunk * chunk).sum()) for chunk in chunks)),
        math.inf: max(float(chunk.max()) for chunk in chunks),
    }


def _log_uniform(low: float, high: float) -> Tensor:
    """Magnitudes spread evenly over the decades from low to high."""
    x = torch.rand(N).mul_(math.log(high / low)).add_(math.log(low))
    return x.exp_().clamp_(max=high)


LARGE: dict[str, Callable[[], Tensor]] = {
    "normal-float32": lambda: torch.randn(N),
    "normal-bfloat16": lambda: torch.randn(N).to(BF16),
    "normal-float16": lambda: torch.randn(N).to(F16),
    # equal elements: every rounding error has the same sign
    "a-tenth-float32": lambda: torch.full((N,), 0.1),
    "decades-1e-38-to-3e38-float32": lambda: _log_uniform(1e-38, 3e38),
    "decades-1e-30-to-1e-10-float32": lambda: _log_uniform(1e-30, 1e-10),
    "decades-1e-38-to-3e38-bfloat16": lambda: _log_uniform(1e-38, 3e38).to(BF16),
}


@pytest.fixture(scope="module", params=LARGE)
def large(request: pytest.FixtureRequest) -> tuple[Tensor, dict[float, float]]:
    torch.manual_seed(0)
    x = LARGE[request.param]()
    return x, expected(x)


@pytest.mark.slow
def test_fifty_million_elements(
    large: tuple[Tensor, dict[float, float]], cpu_available: None
) -> None:
    x, right = large
    for p, norm in right.items():
        total = fastclip.get_total_norm([x], p)
        if norm > torch.finfo(F32).max:
            assert total.item() == math.inf
        else:
            assert total.item() == pytest.approx(norm, rel=tolerances.NORM[F32])


@pytest.mark.slow
def test_fifty_million_elements_before_rounding(
    large: tuple[Tensor, dict[float, float]], variant: Variant, opened: Backend
) -> None:
    """In the table, where a norm beyond float32 is still a number."""
    x, right = large
    if variant.backend == "reference":  # a tenth of it: 30 s otherwise
        x = x[: N // 10]
        right = expected(x)
    for p in (2.0, 1.0, math.inf):
        power = opened.measure([x], p, None)[0, 0].item()
        norm = math.sqrt(power) if p == 2 else power
        assert norm == pytest.approx(right[p], rel=tolerances.NORM[F32])


MAGNITUDES = [10.0**k for k in range(-44, 39)] + [3e38]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_magnitude(dtype: torch.dtype, opened: Backend) -> None:
    """Elements of each magnitude from 1e-44 to 3e38, alone, and with a few ten times larger."""
    generator = torch.Generator().manual_seed(5)
    shape = torch.rand(3001, generator=generator, dtype=torch.float64) / 2 + 0.5
    worst: dict[float, float] = {}
    for magnitude in MAGNITUDES:
        alone = (shape * magnitude).to(dtype)
        beside = alone.clone()
        beside[::1000] = min(magnitude * 10, 3e38)
        for x in (alone, beside):
            if not x.any():
                continue  # below half of bfloat16's smallest number
            for p in (1.0, 2.0):
                power = opened.measure([x], p, None)[0, 0].item()
                norm = math.sqrt(power) if p == 2 else power
                error = abs(norm / expected(x)[p] - 1)
                worst[magnitude] = max(worst.get(magnitude, 0.0), error)
    too_far = {magnitude: error for magnitude, error in worst.items() if error > 1e-6}
    assert not too_far
    assert len(worst) >= 80


def _unlucky(terms: int) -> list[float]:
    """Numbers near 1 of which each, added to the float32 sum of those before, is rounded up by
    nearly half a unit: the worst that can happen to a sum of that many terms."""
    one = torch.tensor(1.0)
    total, found = 1.5 * one, [1.5]
    while len(found) < terms:
        unit = torch.nextafter(total + 1, one * math.inf) - (total + 1)
        candidates = 1 + torch.arange(2048) * torch.finfo(F32).eps
        gain = (total + candidates).double() - (total.double() + candidates.double())
        best = int(gain.argmax())
        assert gain[best] > 0.2 * unit
        total = total + candidates[best]
        found.append(float(candidates[best]))
    return found


@pytest.mark.parametrize("terms", [8, 16, 32, 64, 256, 1024])
@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
def test_rounding_errors_that_all_point_upwards(terms: int, lanes: int, opened: Backend) -> None:
    """Each number repeated for every lane of the float32 sums kept side by side."""
    x = torch.tensor(_unlucky(terms)).repeat_interleave(lanes)
    assert opened.measure([x], 1.0, None)[0, 0].item() == pytest.approx(expected(x)[1.0], rel=1e-6)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 100, 2047, 2048, 2049, 10_000])
def test_squares_at_the_edge_of_float32(length: int, opened: Backend) -> None:
    """Where sums of squares leave float32's normal range, on either side, alone or in part."""
    for exponent in [*range(-76, -56), *range(56, 66)]:
        x = torch.full((length,), 1.3 * 2.0**exponent)
        x[length // 2 :] *= 0.37
        power = opened.measure([x], 2.0, None)[0, 0].item()
        assert math.sqrt(power) == pytest.approx(expected(x)[2.0], rel=1e-6), exponent


@pytest.mark.slow
def test_more_elements_than_32_bits_count(cpu_available: None) -> None:
    """2**31 + 5 elements in one tensor, 4 GiB: those beyond 2**31 are seen and scaled."""
    n = 2**31 + 5
    free = _free_memory()
    if free < 6 << 30:
        pytest.skip(f"needs 6 GiB of free memory, there are {free / 2**30:.1f}")
    x = torch.zeros(n, dtype=BF16)
    x[0], x[2**31 - 1], x[2**31], x[-1] = 1.0, 2.0, 2.0, 4.0
    parameter = torch.zeros((), dtype=BF16).expand(n).requires_grad_()
    parameter.grad = x
    stats = fastclip.grad_stats(parameter)
    assert stats.numel == (n,)
    assert stats.zero_count.tolist() == [n - 4]
    assert fastclip.clip_grad_norm_(parameter, 2.5).item() == 5.0
    assert x[[0, 2**31 - 1, 2**31, -1]].tolist() == [0.5, 1.0, 1.0, 2.0]


def _free_memory() -> int:
    """Bytes, as Linux estimates them; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
