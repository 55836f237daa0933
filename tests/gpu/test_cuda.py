"""What only a GPU can show of the CUDA backend."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from fastclip.backends import Backend
from tests.gpu.conftest import use
from tests.gpu.test_gpu import MIXED, random_grads


@pytest.fixture
def backend() -> Iterator[Backend]:
    yield from use("cuda")


def launches(call: Callable[..., object], *arguments: object) -> int:
    """By the host's own account, of a call that is not the first of its kind."""
    call(*arguments)
    before = torch.ops.fastclip_cuda.launches()
    call(*arguments)
    return int(torch.ops.fastclip_cuda.launches()) - before


def test_launches(backend: Backend) -> None:
    small = random_grads(40, MIXED)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    large = [*small, torch.randn(l2 // 4, device="cuda")]
    one = torch.ones((), dtype=torch.float64, device="cuda")
    for grads, n_clip in ((small, 1), (large, 2)):
        assert launches(backend.measure, grads, 2.0, one) == 1
        assert launches(backend.scale_, grads, one) == 1
        assert launches(backend.clip_, grads, 2.0, 1.0, None) == n_clip
        assert launches(backend.clip_, grads, 2.0, math.inf, None) == 1
