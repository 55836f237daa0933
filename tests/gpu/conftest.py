"""A GPU and something that makes a wait for it an error, or a skip that says why not."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda.is_available() is false: no GPU here")


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """Within it any call that waits for the device raises."""
    torch.cuda.synchronize()
    return _no_sync
