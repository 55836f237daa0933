"""Each backend with kernels for GPUs, or a skip that says why it cannot be had."""

from collections.abc import Iterator

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import Backend, triton


def use(name: str) -> Iterator[Backend]:
    """The backend, in use within the test."""
    interpreted = name == "triton" and triton.interpreted()
    reason = "interpreted" if interpreted else backends.available()[name]
    if reason is not None:
        pytest.skip(f"no GPU for the backend {name}: {reason}")
    with fastclip.backend(name) as backend:
        yield backend


@pytest.fixture(params=["triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from use(request.param)


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
