"""What only a GPU can show, of each backend: no wait for it, streams, CUDA graphs, sizes."""

import math

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip.backends import Backend, reference
from fastclip.testing.compare import bitwise_equal

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MIXED = (F32, BF16, F64)


def random_grads(
    n: int = 40, dtypes: tuple[torch.dtype, ...] = (F32,), size: int = 5000
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(n)
    return [
        torch.randn(i * 7919 % size, device="cuda", generator=generator).to(dtypes[i % len(dtypes)])
        for i in range(n)
    ]


def check(grads: list[Tensor], before: list[Tensor], result: tuple[Tensor, ...]) -> None:
    table, total, coef = result
    assert torch.allclose(table, reference.measure(before, 2.0, None), rtol=2e-6, atol=0)
    expected = float(sum(x.double().square().sum() for x in before)) ** 0.5
    assert float(total) == pytest.approx(expected, rel=1e-6)
    for after, old in zip(grads, before, strict=True):
        wide = F64 if old.dtype == F64 else F32
        assert torch.allclose(
            after.to(wide), (old.to(wide) * coef.to(wide)).to(old.dtype).to(wide), rtol=1e-2 / 2
        )


def clip(
    backend: Backend, grads: list[Tensor], max_norm: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    assert backend.quick_clip_
    result = backend.quick_clip_(grads, 2.0, max_norm)
    assert result is not None
    return result


@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), MIXED], ids=str)
def test_nothing_waits(backend: Backend, dtypes: tuple[torch.dtype, ...], no_sync: None) -> None:
    grads, half = random_grads(dtypes=dtypes), torch.full((), 0.5, device="cuda", dtype=F64)
    moved = [grad.clone() for grad in grads]
    each = torch.rand(len(grads), device="cuda", dtype=F64)
    for _ in range(3):
        for some in (grads, moved):
            backend.measure(some, 1.0, half)
            backend.clip_(some, 2.0, 1.0, half)
            backend.clip_(some, math.inf, half, None)
            backend.scale_(some, each)
            fastclip.clip_grad_norm_([with_grad(grad) for grad in some], 1.0)
            fastclip.grad_stats([with_grad(grad) for grad in some])


def with_grad(grad: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty_like(grad))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("n", [1, 40, 3000])
@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), MIXED], ids=str)
def test_right(backend: Backend, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    grads = [*random_grads(n, dtypes), torch.randn(300_000, device="cuda")[1:]]
    before = [grad.clone() for grad in grads]
    check(grads, before, clip(backend, grads))


def test_the_same_bits_in_20_runs(backend: Backend) -> None:
    grads = [torch.randn(n, device="cuda") for n in (30_000_000, 7, 5_000_000, *(400 * [3000]))]
    first = backend.measure(grads, 2.0, None)
    for _ in range(20):
        assert bitwise_equal(backend.measure(grads, 2.0, None), first)


@pytest.mark.parametrize("dtypes", [(F32,), MIXED], ids=str)
def test_a_graph_replays_with_other_values(
    backend: Backend, dtypes: tuple[torch.dtype, ...]
) -> None:
    grads = random_grads(dtypes=dtypes)
    originals = [grad.clone() for grad in grads]
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        clip(backend, grads)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = clip(backend, grads)
    for factor in (1.0, 3.0, 1e-4, 1.0):
        for grad, original in zip(grads, originals, strict=True):
            grad.copy_(original * factor)
        before = [grad.clone() for grad in grads]
        # eager calls in between must not disturb the graph's tables, nor it theirs
        other = [grad.clone() for grad in grads]
        check(other, before, clip(backend, other))
        graph.replay()
        torch.cuda.synchronize()
        check(grads, before, result)


def test_moved_while_the_device_is_busy(backend: Backend) -> None:
    lists = [[grad * (i + 1) for grad in random_grads()] for i in range(8)]
    before = [[grad.clone() for grad in grads] for grads in lists]
    clip(backend, [grad.clone() for grad in lists[0]])
    torch.cuda._sleep(100_000_000)  # what follows is queued before any of it runs
    results = [clip(backend, grads) for grads in lists]
    for grads, old, result in zip(lists, before, results, strict=True):
        check(grads, old, result)


def test_two_streams_at_once(backend: Backend) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    lists = [[grad * (i + 1) for grad in random_grads()] for i in range(2)]
    before = [[grad.clone() for grad in grads] for grads in lists]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, ...]] = []
    for _ in range(5):
        results = []
        for stream, grads, old in zip(streams, lists, before, strict=True):
            with torch.cuda.stream(stream):
                for grad, value in zip(grads, old, strict=True):
                    grad.copy_(value)
                results.append(clip(backend, grads))
    torch.cuda.synchronize()
    for grads, old, result in zip(lists, before, results, strict=True):
        check(grads, old, result)


def test_not_needed_writes_nothing(backend: Backend) -> None:
    grads = random_grads(dtypes=MIXED)
    before = [grad.clone() for grad in grads]
    clip(backend, grads, 1e9)
    assert all(bitwise_equal(a, b) for a, b in zip(grads, before, strict=True))


def test_more_than_2_31_elements(backend: Backend) -> None:
    n = (1 << 31) + 77
    if torch.cuda.mem_get_info()[0] < 3 * n:
        pytest.skip("less than 6.4 GB free")
    grad = torch.zeros(n, dtype=BF16, device="cuda")
    grad[-1], grad[1 << 31], grad[5] = 3.0, 4.0, 12.0
    table, total, _ = clip(backend, [grad], 6.5)
    assert table.tolist() == [[169.0, 12.0, 0, 0, n - 3]]
    assert float(total) == 13.0
    assert [float(grad[i]) for i in (-1, 1 << 31, 5)] == [1.5, 2.0, 6.0]


def test_compiled(backend: Backend) -> None:
    params = [with_grad(grad) for grad in random_grads(n=9)]
    before = [p.grad.clone() for p in params if p.grad is not None]
    step = torch.compile(lambda ps: fastclip.clip_grad_norm_(ps, 1.0), fullgraph=True)
    total = step(params)
    assert float(total) == pytest.approx(float(torch.cat(before).double().norm()), rel=1e-6)


def test_two_gpus(backend: Backend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    grads = [grad.to(f"cuda:{i % 2}") for i, grad in enumerate(random_grads())]
    total = fastclip.clip_grad_norm_([with_grad(grad) for grad in grads], 1.0)
    after = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    assert after == pytest.approx(1.0, rel=1e-5)
    assert total.device == grads[0].device
    assert backend.quick_clip_
    assert backend.quick_clip_(grads, 2.0, 1.0) is None  # each device has a list of its own
