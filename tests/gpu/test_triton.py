"""What only a GPU can show of the Triton backend."""

from collections.abc import Iterator

import pytest
import torch

from fastclip.backends import Backend, triton
from fastclip.backends.triton_plan import Grid
from fastclip.testing.compare import bitwise_equal
from tests.gpu.conftest import use
from tests.gpu.test_gpu import BF16, clip, random_grads


@pytest.fixture
def backend() -> Iterator[Backend]:
    yield from use("triton")


def test_one_launch_equals_two(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = triton._grid(torch.device("cuda", 0))
    if not grid.cooperative_bytes:
        pytest.skip("no cooperative launches here")
    for grads in (random_grads(3), random_grads(1000), random_grads(40, (BF16,), 100_000)):
        one, two = ([grad.clone() for grad in grads] for _ in range(2))
        monkeypatch.setattr(triton, "_grid", lambda device: grid)
        found = clip(backend, one)
        monkeypatch.setattr(triton, "_grid", lambda device: Grid(grid.cooperative_blocks))
        expected = clip(backend, two)
        assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(bitwise_equal(a, b) for a, b in zip(one, two, strict=True))
