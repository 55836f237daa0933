"""The Triton backend on a GPU, or a skip that says why not."""

from collections.abc import Iterator

import pytest
import torch

from fastclip import backends
from fastclip.backends import triton as backend


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    reason = "interpreted" if backend.interpreted() else backends.available()["triton"]
    if reason is not None:
        pytest.skip(f"no GPU for the Triton backend: {reason}")


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
