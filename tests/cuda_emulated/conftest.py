"""The CUDA backend on an emulated device, built once a session."""

import platform
import sys
from collections.abc import Iterator

import pytest

from fastclip import _build
from fastclip.backends import Backend
from tests.cuda_emulated.library import ROOT, Device, build


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where the emulation cannot be built, with the reason."""
    if reason := _build.missing_compiler():
        pytest.skip(reason)
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "aarch64"):
        pytest.skip(f"no emulation on {sys.platform}, {platform.machine()}")


@pytest.fixture(scope="session")
def built(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Device:
    library = tmp_path_factory.mktemp("emulated") / "fastclip_cuda.so"
    build(library, ROOT / "csrc")
    return Device(library)


@pytest.fixture
def device(built: Device) -> Iterator[Device]:
    """Two multiprocessors: up to 8 blocks, up to 4 of a cooperative launch."""
    with built.having(sm_count=2, seed=0, cooperative=1):
        yield built


@pytest.fixture
def cuda(device: Device) -> Backend:
    return device.backend()
