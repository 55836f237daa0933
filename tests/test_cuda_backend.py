"""What the backend `cuda` says and loads, on machines that are made up: nothing here needs nvcc."""

from pathlib import Path

import pytest
import torch

from fastclip import _build_cuda
from fastclip._build_cuda import Arch
from fastclip.backends import cuda
from fastclip.backends.contract import Unavailable
from tests.toolchain import Tools

TORCH_DIR = Path(torch.__file__).parent


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


@pytest.fixture
def library(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tools.folder / "_C_cuda.abi3.so"
    monkeypatch.setattr(cuda, "LIBRARY", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return library


def reason() -> str:
    with pytest.raises(Unavailable) as caught:
        cuda.provide()
    return str(caught.value)


def test_without_a_device(library: Path, tools: Tools) -> None:
    no_device = ", and torch finds no CUDA device here"
    assert reason() == f"not built ahead{no_device}"
    _build_cuda.build(library, _build_cuda.chosen()[0], torch_dir=TORCH_DIR)
    assert (
        reason()
        == ("built ahead for compute capability 8.0, 9.0, 10.0, 12.0+PTX, " + str(library))
        + no_device
    )
    (tools.csrc / "table.h").write_text("//\n")
    assert reason() == f"built ahead from other sources, {library}{no_device}"


def test_rocm(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert reason() == ("this torch is built for ROCm, and these kernels are for NVIDIA GPUs")


@pytest.fixture
def device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))


def test_a_device_and_no_nvcc(device: None, tools: Tools) -> None:
    (tools.home / "bin" / "nvcc").unlink()
    assert reason() == str(_build_cuda.missing_nvcc())


def test_a_library_for_other_devices(device: None, library: Path, tools: Tools) -> None:
    _build_cuda.build(library, [Arch(8, 0)], torch_dir=TORCH_DIR)
    (tools.home / "bin" / "nvcc").unlink()
    assert reason() == (
        f"{library} was built for 8.0 and not for the device's 9.0, and "
        f"{_build_cuda.missing_nvcc()}"
    )


@pytest.mark.parametrize(("arch", "built"), [("9.0", False), ("8.0+PTX", False), ("8.0", True)])
def test_what_is_loaded(
    arch: str,
    built: bool,
    device: None,
    library: Path,
    tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    _build_cuda.build(library, _build_cuda.parse(arch), torch_dir=TORCH_DIR)
    origin = cuda._loaded.__wrapped__()
    if built:
        assert loaded[0].parent == tools.folder / "cache"
        assert origin == f"built at first use, {loaded[0]}"
        csrc = tools.csrc
        assert _build_cuda.built_for(loaded[0], csrc) == [Arch(9, 0)]
    else:
        assert loaded == [library]
        assert origin == f"built ahead, {library}"
