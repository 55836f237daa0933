"""Each backend with kernels for GPUs, or a skip that says why it cannot be had."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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


@contextmanager
def _waiting_raises() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any call that waits for the device raises."""
    with _waiting_raises():
        yield


@pytest.fixture
def waiting_raises() -> Callable[[], AbstractContextManager[None]]:
    """The same for a part of a test."""
    return _waiting_raises
