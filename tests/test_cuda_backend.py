"""What the backend `cuda` says and loads, on machines that are made up: nothing here needs nvcc."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastclip import _build_cuda, backends
from fastclip._build_cuda import Arch
from fastclip.backends import cuda, native
from fastclip.backends.contract import Backend, Unavailable
from tests.toolchain import Tools

TORCH_DIR = Path(torch.__file__).parent
OPERATORS = ("measure", "scale_", "clip_", "served")


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


@pytest.fixture
def kernels(device: None, library: Path, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What is put into this list is raised when a kernel is started."""
    errors: list[Exception] = []

    class Kernels:
        def __init__(self, *arguments: object) -> None:
            pass

        def measure(self, *arguments: object) -> tuple[torch.Tensor, int]:
            if errors:
                raise errors[0]
            return torch.zeros(1, 5), -1

    monkeypatch.setattr(cuda, "Operators", Kernels)
    built = SimpleNamespace(source_hash=lambda: "0123 for 9.0")
    monkeypatch.setattr(torch.ops, "fastclip_cuda", built, raising=False)
    monkeypatch.setattr(cuda, "_loaded", lambda: f"built ahead, {library}")
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: torch.ones(size))
    return errors


def test_kernels_that_start(kernels: list[Exception], library: Path) -> None:
    provided = cuda.provide()
    assert (provided.name, provided.device_types) == ("cuda", frozenset({"cuda"}))
    assert provided.about.startswith(f"CUDA kernels, built ahead, {library}; complex gradients and")


def test_kernels_that_do_not_start(kernels: list[Exception], library: Path) -> None:
    kernels.append(RuntimeError("CUDA could not start a kernel: the driver is too old"))
    assert reason() == (
        f"CUDA kernels, built ahead, {library}, but they do not start: "
        "CUDA could not start a kernel: the driver is too old"
    )


def test_memory_that_is_short_for_now_is_no_reason(kernels: list[Exception]) -> None:
    kernels.append(torch.OutOfMemoryError("CUDA out of memory"))
    backends._found.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        backends.get("cuda")
    kernels.clear()
    assert backends.get("cuda").name == "cuda"
    backends._found.cache_clear()


def test_a_device_that_the_library_is_not_for(
    kernels: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(6, 1), (9, 0)][i])

    def zeros(*size: int, device: object = None) -> torch.Tensor:
        tried.append(device)
        return torch.ones(size)

    monkeypatch.setattr(torch, "zeros", zeros)
    words = "the library is built for compute capability 9.0, and cuda:0 has 6.1"
    assert f"; {words}; complex" in cuda.provide().about
    assert tried[0] == "cuda:1"
    monkeypatch.undo()
    operators = cuda.Operators(
        SimpleNamespace(**dict.fromkeys(OPERATORS, SimpleNamespace(default=None))), {0: words}
    )
    grad: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=f"^the backend 'cuda' cannot serve .* cuda:0: {words}$"):
        operators.measure([grad], 2.0, None)


def test_a_library_for_one_of_two_devices(
    device: None, library: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build_cuda.build(library, [Arch(9, 0)], torch_dir=TORCH_DIR)
    assert cuda._unfit({(9, 0), (8, 9)}) is None
    assert cuda._unfit({(8, 6), (8, 9)}) == ("was built for 9.0 and not for the device's 8.6, 8.9")


def test_cuda_that_does_not_start(
    device: None, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(index: int) -> tuple[int, int]:
        raise RuntimeError("Cannot re-initialize CUDA")

    monkeypatch.setattr(torch.cuda, "get_device_capability", fails)
    said = "not built ahead, and CUDA does not start: Cannot re-initialize CUDA"
    assert reason() == said
    backends._found.cache_clear()
    assert backends.available()["cuda"] == said
    with pytest.raises(RuntimeError, match="there is no backend 'typo'; available: "):
        backends.get("typo")
    backends._found.cache_clear()


@pytest.mark.parametrize("module", [cuda, native], ids=["cuda", "cpu"])
def test_a_library_that_cannot_be_read(
    module: Any, device: None, library: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    library.write_bytes(b"")
    monkeypatch.setattr(module, "LIBRARY", library)
    monkeypatch.setattr(Path, "read_bytes", refuses)
    monkeypatch.setattr(module, "_loaded", module._loaded.__wrapped__)
    with pytest.raises(Unavailable) as caught:
        module.provide()
    assert str(caught.value).startswith(f"{library} cannot be read (Permission denied), and ")
    if module is cuda:
        said = f"built ahead, but it cannot be read (Permission denied), {library}"
        assert cuda.built_ahead() == said


def test_it_comes_after_triton(kernels: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Backend | Unavailable] = {"cuda": cuda.provide()}
    found["triton"] = Unavailable("the package triton is not installed")
    monkeypatch.setattr(backends, "_found", found.get)
    chosen, skipped = backends._automatic.__wrapped__("cuda")
    assert chosen is found["cuda"]
    assert skipped == ["'triton' is not available: the package triton is not installed"]
    triton = found["triton"] = replace(chosen, name="triton")
    assert backends._automatic.__wrapped__("cuda") == (triton, [])
