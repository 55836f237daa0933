"""What the kernels read and write, counted by the emulated device: all of it, with the tables, the
partial results and the addresses."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip.backends import Backend
from fastclip.backends.lists import NORMS
from tests.cuda_emulated.library import Device

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHARE = 0.01  # of the gradients' bytes: what else there may be

# More than 1 MiB each.
LISTS: dict[str, Callable[[], list[Tensor]]] = {
    "one": lambda: [torch.randn(300_000)],
    "mixed": lambda: [torch.randn(70_000 + i).to(d) for i, d in enumerate((F32, BF16, F16, F64))],
    "misaligned": lambda: [torch.randn(200_001)[1:], torch.randn(200_001)[1:].half()],
    "layers": lambda: list(torch.randn(30, 10_000).unbind()),
}


@pytest.fixture(params=LISTS)
def grads(request: pytest.FixtureRequest) -> list[Tensor]:
    found = LISTS[request.param]()
    assert _size(found) > 1 << 20
    return found


# As many blocks as an H100 has room for, and few.
@pytest.fixture(params=[132, 2], ids=["528-blocks", "8-blocks"], autouse=True)
def _blocks(request: pytest.FixtureRequest, device: Device) -> None:
    device.set("sm_count", request.param)


def _size(grads: list[Tensor]) -> int:
    return sum(grad.numel() * grad.itemsize for grad in grads)


def _moved(device: Device, grads: list[Tensor], call: Callable[[], object]) -> tuple[float, float]:
    """Bytes read and written per byte of gradients."""
    device.set("bytes_read", 0)
    device.set("bytes_written", 0)
    call()
    return device.get("bytes_read") / _size(grads), device.get("bytes_written") / _size(grads)


@pytest.mark.parametrize("p", NORMS)
def test_all_five_statistics_in_one_read(
    p: float, grads: list[Tensor], device: Device, cuda: Backend
) -> None:
    cuda.measure(grads, p, None)  # the plan is made
    read, written = _moved(device, grads, lambda: cuda.measure(grads, p, None))
    assert 1 <= read <= 1 + SHARE
    assert written <= SHARE


@pytest.mark.parametrize("cooperative", [0, 1], ids=["two-launches", "cooperative"])
def test_clip(cooperative: int, grads: list[Tensor], device: Device, cuda: Backend) -> None:
    inverse = torch.tensor(0.5, dtype=F64)
    with device.having(cooperative=cooperative):
        cuda.clip_(grads, 2.0, math.inf, None)
        read, written = _moved(device, grads, lambda: cuda.clip_(grads, 2.0, 1e9, None))
        assert 1 <= read <= 1 + SHARE
        assert written <= SHARE
        for max_norm, inv_scale in ((100.0, None), (10.0, None), (1.0, inverse), (1e9, inverse)):
            with device.having(bytes_read=0, bytes_written=0):
                cuda.clip_(grads, 2.0, max_norm, inv_scale)
                read = device.get("bytes_read") / _size(grads)
                written = device.get("bytes_written") / _size(grads)
            assert 2 <= read <= 2 + 2 * SHARE
            assert 1 <= written <= 1 + SHARE


def test_scale(grads: list[Tensor], device: Device, cuda: Backend) -> None:
    coef = torch.tensor(0.5, dtype=F64)
    cuda.scale_(grads, coef)
    read, written = _moved(device, grads, lambda: cuda.scale_(grads, coef))
    assert 1 <= read <= 1 + SHARE
    assert 1 <= written <= 1 + SHARE
    read, written = _moved(device, grads, lambda: cuda.scale_(grads, torch.ones_like(coef)))
    assert read <= SHARE
    assert written == 0


def test_what_is_not_finite_costs_its_run_alone(device: Device, cuda: Backend) -> None:
    grads = [torch.randn(1 << 19)]
    grads[0][12345] = math.inf
    cuda.measure(grads, 2.0, None)
    read, _ = _moved(device, grads, lambda: cuda.measure(grads, 2.0, None))
    assert read <= 1 + SHARE


def test_addresses_in_a_table(device: Device, cuda: Backend) -> None:
    grads = list(torch.randn(600, 1000).unbind())
    with device.having(driver_version=12000):
        cuda.measure(grads, 2.0, None)
        stored = _moved(device, grads, lambda: cuda.measure(grads, 2.0, None))
    cuda.measure(grads, 2.0, None)
    given = _moved(device, grads, lambda: cuda.measure(grads, 2.0, None))
    n = _size(grads)
    assert (stored[0] - given[0]) * n == pytest.approx(8 * 600, rel=1e-6)  # one for each part
    assert stored[1] == given[1]
