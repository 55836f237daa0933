"""Lists: many dtypes or tensors in one launch, where addresses travel, launches, plans, capture."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip.backends import Backend
from fastclip.testing import compare, reference64
from tests.cuda_emulated.library import Device

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TILE = 16384  # bytes
IN_LARGE_ARGUMENTS, IN_SMALL_ARGUMENTS = 4078, 495  # addresses


def same(cuda: Backend, grads: list[Tensor], p: float = 2.0) -> None:
    """Table, norm, coefficient and clipped gradients against the float64 reference."""
    before = [grad.clone() for grad in grads]
    total = reference64.total_norm(before, p)
    table, norm, coef = cuda.clip_(grads, p, total / 3, None)
    assert compare.table_error(table, reference64.table(before, p), before, p) <= 1
    assert compare.norm_error(norm, total, before) <= 1
    assert float(coef) == pytest.approx(total / 3 / (total + 1e-6), rel=1e-6)
    for after, old in zip(grads, before, strict=True):
        assert compare.scale_error(after, old, float(coef)) <= 1


def launched(device: Device, call: Callable[..., object], *arguments: object) -> int:
    before = device.launches()
    call(*arguments)
    return device.launches() - before


def mixed(numel: int) -> list[Tensor]:
    dtypes = (F32, BF16, F16, F64, F16, F32, F64, BF16)
    return [torch.randn(numel + i).to(dtype) for i, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("cooperative", [0, 1], ids=["two-launches", "cooperative"])
@pytest.mark.parametrize("numel", [0, 1, 1000, 20000])
def test_mixed_dtypes_in_one_launch(
    numel: int, cooperative: int, device: Device, cuda: Backend
) -> None:
    with device.having(cooperative=cooperative):
        same(cuda, mixed(numel))
        before = device.get("launches"), device.get("cooperative_launches")
        same(cuda, mixed(numel))
        after = device.get("launches"), device.get("cooperative_launches")
    assert after[0] - before[0] == 2 * (1 - cooperative)
    assert after[1] - before[1] == cooperative


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_borders_of_vectors_tiles_and_runs(
    dtype: torch.dtype, offset: int, device: Device, cuda: Backend
) -> None:
    tile = TILE // dtype.itemsize
    borders = (16 // dtype.itemsize, 4096 // dtype.itemsize, tile, 2 * tile)
    storage = [torch.randn(border + 16).to(dtype) for border in borders for _ in range(3)]
    sizes = [border + more for border in borders for more in (-1, 0, 1)]
    with device.having(cooperative=0):
        same(cuda, [x[offset : offset + n] for x, n in zip(storage, sizes, strict=True)])


def test_what_is_not_finite_is_counted_in_every_part(cuda: Backend) -> None:
    grads = [torch.randn(50 * TILE // 4), torch.randn(40)]
    places = torch.arange(0, grads[0].numel(), 10007)
    grads[0][places] = torch.tensor([math.nan, math.inf, -math.inf, 0.0]).repeat(9)[: len(places)]
    counts = [int((places // 10007 % 4 == i).sum()) for i in range(4)]
    for p in (0.0, 1.0, 2.0, math.inf, 2.0):  # the second time finds the counters as the first did
        table = cuda.measure(grads, p, None)
        assert table[:, 2:].tolist() == [[counts[0], counts[1] + counts[2], counts[3]], [0, 0, 0]]
        assert math.isnan(table[0, 0]) == (p > 0)


@pytest.mark.parametrize("more", [0, 1], ids=["fit", "one-too-many"])
def test_few_addresses_before_large_arguments(more: int, device: Device, cuda: Backend) -> None:
    grads = list(torch.randn(IN_SMALL_ARGUMENTS + more, 20).unbind())
    with device.having(cooperative=0, driver_version=12000):
        same(cuda, grads)
        assert launched(device, same, cuda, grads) == 2
        elsewhere = [grad.clone() for grad in grads]
        assert launched(device, same, cuda, elsewhere) == 2 + more  # one store


@pytest.mark.parametrize("more", [0, 1], ids=["fit", "one-too-many"])
def test_thousands_of_tensors(more: int, device: Device, cuda: Backend) -> None:
    grads = list(torch.randn(IN_LARGE_ARGUMENTS + more, 2).unbind())
    with device.having(cooperative=0):
        cuda.measure(grads[:], 2.0, None)
        assert launched(device, cuda.measure, grads, 2.0, None) == 1
        elsewhere = [grad.clone() for grad in grads]
        assert launched(device, same, cuda, elsewhere) == 2 + more


def test_launches(device: Device, cuda: Backend) -> None:
    grads = [*mixed(3000), torch.zeros(0), torch.randn(200, 300).t()[:, ::2]]

    half = torch.tensor(0.5, dtype=F64)
    with device.having(cooperative=0):
        cuda.measure(grads, 2.0, None)
        assert launched(device, cuda.measure, grads, 1.0, None) == 1
        assert launched(device, cuda.scale_, grads, half) == 1
        assert launched(device, cuda.clip_, grads, 2.0, 1.0, None) == 2
        assert launched(device, cuda.clip_, grads, 2.0, 1e9, None) == 2
        assert launched(device, cuda.clip_, grads, 2.0, math.inf, half) == 2
        # Nothing can have to be written.
        assert launched(device, cuda.clip_, grads, 2.0, math.inf, None) == 1
    with device.having(l2_bytes=1 << 20):
        cuda.measure(grads, 2.0, None)
        assert launched(device, cuda.clip_, grads, 2.0, 1.0, None) == 1
        more = [*grads, torch.randn(1 << 17)]  # half of the second-level cache
        cuda.measure(more, 2.0, None)
        assert launched(device, cuda.clip_, more, 2.0, 1.0, None) == 2


def test_a_list_that_changes_is_read_where_it_is(cuda: Backend) -> None:
    for n in (1000, 1001, 1000):
        for _ in range(2):
            same(cuda, mixed(n))
            same(cuda, [torch.randn(n), torch.randn(2 * n).bfloat16()])
            same(cuda, [torch.randn(2 * n)[::2], torch.randn(2 * n).bfloat16()])
            same(cuda, [torch.randn(3 * n)[::3], torch.randn(2 * n).bfloat16()])


def test_more_lists_than_plans_are_kept(cuda: Backend) -> None:
    lists = [[torch.randn(n), torch.randn(7)] for n in range(1, 41)]
    for _ in range(2):
        for grads in lists:
            same(cuda, grads)


def test_a_capture_relies_on_nothing_outside_of_it(device: Device, cuda: Backend) -> None:
    grads = mixed(3000)
    same(cuda, grads)
    with device.having(capturing=1):
        for _ in range(2):  # each uploads its own tables: a graph is replayed without this code
            before = device.launches(), device.get("cooperative_launches")
            same(cuda, grads)
            assert device.launches() - before[0] == 1 + 2
            assert device.get("cooperative_launches") == before[1]
    assert launched(device, same, cuda, grads) == 1


@pytest.mark.parametrize("cooperative", [0, 1], ids=["two-launches", "cooperative"])
def test_skip_leaves_everything(cooperative: int, device: Device, cuda: Backend) -> None:
    inv_scale = torch.tensor(0.25, dtype=F64)
    with device.having(cooperative=cooperative):
        for bad in (math.nan, math.inf, -math.inf):
            grads = mixed(5000)
            grads[3][17] = bad
            before = [grad.clone() for grad in grads]
            table, total, coef = cuda.clip_(grads, 2.0, 1.0, inv_scale, True)
            assert all(map(compare.bitwise_equal, grads, before))
            assert float(coef) == 1
            assert float(total) == pytest.approx(abs(bad), nan_ok=True)
            assert float(table[3, 2:4].sum()) == 1
        finite = mixed(5000)
        plain = [grad.clone() for grad in finite]
        coef = cuda.clip_(finite, 2.0, 1.0, inv_scale, True)[2]
        assert float(coef) < 1
        assert torch.equal(coef, cuda.clip_(plain, 2.0, 1.0, inv_scale)[2])
        assert all(map(compare.bitwise_equal, finite, plain))


def test_limit_and_inv_scale_are_read_by_the_device(cuda: Backend) -> None:
    grads = mixed(2000)
    before = [grad.clone() for grad in grads]
    total = reference64.total_norm(before, 2.0) / 8
    limit, inv_scale = torch.tensor(total / 2, dtype=F64), torch.tensor(0.125)
    table, norm, coef = cuda.clip_(grads, 2.0, limit, inv_scale)
    assert float(norm) == pytest.approx(total, rel=1e-6)
    assert float(coef) == pytest.approx(0.5, rel=1e-6)
    expected = reference64.table([grad.double() / 8 for grad in before], 2.0)
    assert torch.allclose(table, expected, rtol=2e-6, atol=0)
    for after, old in zip(grads, before, strict=True):
        assert compare.scale_error(after, old, float(coef) / 8) <= 1
    unlimited = torch.tensor(math.inf, dtype=F64)
    table, norm, coef = cuda.clip_(grads, 2.0, unlimited, None)
    assert float(coef) == 1


def test_errors_name_what_is_wrong(device: Device, cuda: Backend) -> None:
    grads = [torch.ones(3), torch.ones(4)]
    with pytest.raises(RuntimeError, match="coef has 3 elements for 2 gradients"):
        device.operators.scale_(grads, torch.ones(3, dtype=F64))
    with pytest.raises(RuntimeError, match="limit has 2 elements, not one"):
        device.operators.clip_(grads, 2.0, 1.0, torch.ones(2), None, False)
    with pytest.raises(RuntimeError, match=r"norm orders 0, 1, 2 and inf, got 3"):
        device.operators.measure(grads, 3.0, None)
    with (
        device.having(next_error=98),
        pytest.raises(RuntimeError, match="CUDA could not start a kernel: cudaError_t 98"),
    ):
        cuda.measure(grads, 2.0, None)
    assert cuda.measure(grads, 2.0, None)[:, 0].tolist() == [3, 4]
    assert all(bool((grad == 1).all()) for grad in grads)


def test_what_is_refused_is_left_alone(device: Device) -> None:
    x = torch.ones(8)
    odd = torch.frombuffer(bytearray(17), dtype=torch.float32, count=3, offset=1)
    for refused in (x[2:2], odd, torch.ones(3, dtype=torch.complex64), torch.ones(1).expand(3), x):
        grads = [x, torch.ones(3), refused]
        position, written = device.operators.scale_(grads, torch.tensor(0.5, dtype=F64))
        if refused.numel() == 0:
            assert (position, written) == (-1, True)
            x.fill_(1)
        else:
            assert (position, written) == (2, False)
            assert bool((x == 1).all())
            assert device.operators.served(grads) == [True, True, False]


def test_no_plan_is_kept_for_the_streams_of_all_threads(device: Device) -> None:
    grads = [torch.full((2024,), 2.0), torch.ones(7)]
    for stream, launches in ((2, 2), (2, 2), (1, 2), (1, 1)):  # with the tables, or without
        before = device.launches()
        table, refused = device.measure_on(stream, grads)
        assert (table[:, 0].tolist(), refused) == ([8096, 7], -1)
        assert device.launches() - before == launches


@pytest.mark.parametrize("error", [720, 801], ids=["too-large", "not-supported"])
def test_two_launches_where_a_cooperative_one_finds_no_room(
    error: int, device: Device, cuda: Backend
) -> None:
    grads = mixed(20000 + error)  # sizes that no other test has: their plans would remember too
    cuda.measure(grads, 2.0, None)
    assert launched(device, cuda.clip_, grads, 2.0, 1e9, None) == 1
    with device.having(next_error=error):
        assert launched(device, same, cuda, grads) == 2
        assert device.get("next_error") == 0  # it was returned
    assert device.last_error() == 0
    assert launched(device, same, cuda, grads) == 2  # the plan remembers
    with device.having(next_error=error), pytest.raises(RuntimeError, match=f"kernel.* {error}"):
        cuda.measure(grads, 2.0, None)
    assert device.last_error() == 0


def test_addresses_that_could_not_be_stored_are_stored_again(device: Device, cuda: Backend) -> None:
    storages = torch.randn(3, IN_SMALL_ARGUMENTS + 1, 20)
    first, second, third = (list(storage.unbind()) for storage in storages)
    with device.having(driver_version=12000, cooperative=0):
        same(cuda, first)
        for grads in (second, first):
            with device.having(next_error=98), pytest.raises(RuntimeError, match="start a kernel"):
                cuda.measure(grads, 2.0, None)
        same(cuda, second)
        moved = [*second[:7], third[7], *second[8:]]
        with device.having(bytes_written=0):
            cuda.measure(moved, 2.0, None)
            written = device.get("bytes_written")
        assert written == 8 + len(moved) * 40  # an address, and the table
        same(cuda, moved)


def test_a_clip_after_a_failed_store_finds_its_own_list(device: Device, cuda: Backend) -> None:
    first, second = (list(storage.unbind()) for storage in torch.randn(2, 600, 8))
    with device.having(driver_version=12000):
        same(cuda, first)
        left = [grad.clone() for grad in first]
        with device.having(next_error=98), pytest.raises(RuntimeError, match="start a kernel"):
            cuda.clip_(second, 2.0, 1.0, None)
        same(cuda, second)
    assert all(map(compare.bitwise_equal, first, left))
