"""The result does not depend on the number of threads or the run; memory does not grow."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip.backends import Backend
from fastclip.testing.compare import bitwise_equal
from fastclip.testing.variants import Variant
from tests.making import grads_of, parameters

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Sizes on both sides of whatever share of the work one thread gets.
LISTS: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "one-embedding": [((1_500_007,), F32)],
    "many-biases": [((n % 700 + 1,), F32) for n in range(1200)],
    "large-beside-small": [((3,), F32), ((900, 1000), BF16), ((65,), F16), ((300_001,), F64)],
    "mixed": [((40_000 + 13 * n,), (F32, BF16, F16, F64)[n % 4]) for n in range(24)],
    "strided": [((1000, 700), F32), ((701, 999), BF16)],
}


def _make(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in LISTS[name]]
    return [tensor.t() for tensor in tensors] if name == "strided" else tensors


def _all_results(backend: Backend, name: str, p: float) -> Iterator[Tensor]:
    grads = _make(name)
    yield backend.measure(grads, p, None)
    yield from backend.clip_(grads, p, 0.5, None)
    yield from grads


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(bitwise_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("p", [2.0, 1.0, float("inf"), 0.0])
@pytest.mark.parametrize("name", LISTS)
def test_any_number_of_threads(name: str, p: float, variant: Variant, opened: Backend) -> None:
    if variant.backend != "cpu":
        pytest.skip("only the CPU kernels promise this")
    results = []
    for threads in (1, 2, 4, 3, 7):
        torch.set_num_threads(threads)
        results.append(list(_all_results(opened, name, p)))
    assert all(_same(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_flushing_denormals_changes_nothing(dtype: torch.dtype, opened: Backend) -> None:
    """torch.set_flush_denormal holds for the calling thread alone, and not for torch's pool."""
    if opened.name != "cpu":
        pytest.skip("the reference is torch's own arithmetic, which flushes")
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(1_000_003, generator=generator) * 1e-38).to(dtype)
    expected, scaled = opened.measure([values], 2.0, None), values.clone()
    half = torch.tensor(0.5, dtype=F64)
    opened.scale_([scaled], half)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        again = values.clone()
        assert torch.set_flush_denormal(True)
        try:
            table = opened.measure([again], 2.0, None)
            opened.scale_([again], half)
        finally:
            torch.set_flush_denormal(False)
        assert _same([expected, scaled], [table, again])


@pytest.mark.parametrize("name", LISTS)
def test_twenty_runs(name: str, opened: Backend) -> None:
    torch.set_num_threads(4)
    grads = _make(name)
    first = opened.measure(grads, 2.0, None)
    assert all(bitwise_equal(first, opened.measure(grads, 2.0, None)) for _ in range(19))


def test_twenty_clips() -> None:
    torch.set_num_threads(4)
    seen = []
    for _ in range(20):
        params = parameters(*_make("mixed"))
        seen.append([fastclip.clip_grad_norm_(params, 1.0), *grads_of(params)])
    assert all(_same(seen[0], other) for other in seen[1:])


MEMORY = """
import sys
from pathlib import Path
import torch, fastclip

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def extra(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use now
    before = kib("VmRSS")
    work()
    return kib("VmHWM") - before

dtype = getattr(torch, sys.argv[1])
params = []
for n in (12_000_000, 4_000_000, 100):
    p = torch.zeros((), dtype=dtype).expand(n).requires_grad_()
    p.grad = torch.randn(n).to(dtype)
    params.append(p)
warm = torch.zeros(3_000_000, dtype=dtype, requires_grad=True)
warm.grad = torch.ones_like(warm)
for p in (2.0, 1.0, float("inf"), 0.0):
    fastclip.clip_grad_norm_(warm, 1e-3, p)  # threads' stacks, and pages of code
    fastclip.grad_stats(warm, p)
print(extra(lambda: [fastclip.clip_grad_norm_(params, 1e9), fastclip.grad_stats(params)]))
print(extra(lambda: [fastclip.clip_grad_norm_(params, 0.5, p) for p in (2.0, 1.0, float("inf"))]))
print(extra(lambda: params[0].grad.clone()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_extra_memory_is_below_one_mebibyte(dtype: str, cpu_available: None) -> None:
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, dtype], cwd=root, capture_output=True, text=True, check=True
    )
    measuring, clipping, copying = (int(line) for line in run.stdout.split())
    assert copying > 20_000  # KiB: the method does see a copy of a gradient
    assert measuring <= 1024
    assert clipping <= 1024


RESIDENT = """
import gc
from pathlib import Path
import torch, fastclip

def kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

params = []
for grad in [*torch.randn(20, 50).unbind(), torch.randn(4, 5).t(), torch.zeros(0)]:
    p = torch.zeros_like(grad, requires_grad=True)
    p.grad = grad
    params.append(p)
others = [p.grad for p in params] + [torch.ones(1).expand(5), torch.tensor([1 + 2j])]

def work(times):
    for _ in range(times):
        fastclip.clip_grad_norm_(params, 1.0)
        fastclip.clip_grad_norm_(params, 1.0, 3)
        fastclip.clip_grads_with_norm_(params, 1.0, torch.tensor(1.01))
        fastclip.grad_stats(params)
        fastclip.get_total_norm(others)

work(500)
gc.collect()
before = kib()
work(2000)
gc.collect()
print(kib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_thousands_of_calls_leave_nothing_behind(cpu_available: None) -> None:
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT], cwd=root, capture_output=True, text=True, check=True
    )
    # a table of 22 rows kept by each round would come to 2000 * 22 * 40 bytes = 1.7 MiB
    assert int(run.stdout) <= 512
