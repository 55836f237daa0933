"""A wheel with the CUDA library in it, where there is CUDA or not; what can stand in the way."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip import _build_cuda
from tests.test_abi import audited, needs_audit
from tests.test_install import build_wheel, clip, copy_source, install, run
from tests.test_install import quick_compiler as quick_compiler
from tests.toolchain import script

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(
    bool(_build_cuda.missing_nvcc()), reason=f"no CUDA is compiled: {_build_cuda.missing_nvcc()}"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, quick_compiler: str) -> Path:
    source = copy_source(tmp_path_factory.mktemp("cuda") / "source")
    settings = {"FASTCLIP_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    done = build_wheel(Path(sys.executable), source, CXX=quick_compiler, **settings)
    assert done.returncode == 0, done.stderr
    assert (
        "fastclip: _C_cuda.abi3.so is built ahead, for compute capability 9.0 by nvcc "
        f"{_build_cuda.version()}"
    ) in done.stdout.splitlines()
    return source / "dist" / done.stdout.splitlines()[-1]


@needs_nvcc
def test_both_libraries_in_one_wheel(wheel: Path, tmp_path: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        libraries = {name for name in file.namelist() if name.endswith(".so")}
    assert libraries == {"fastclip/_C.abi3.so", "fastclip/_C_cuda.abi3.so"}
    installed = install(wheel, tmp_path / "installed")
    settings = {"CXX": "none", "CUDA_HOME": "none", "FASTCLIP_CACHE": str(tmp_path / "cache")}
    said, messages = clip(installed, tmp_path / "empty", **settings)
    assert messages == ""
    assert said["libraries"] == [str(installed / "fastclip" / "_C.abi3.so")]
    report = doctor(installed, tmp_path, **settings)
    library = installed / "fastclip" / "_C_cuda.abi3.so"
    if torch.cuda.is_available():
        assert report["backends"]["cuda"] is None
        assert report["cuda_library"] == f"CUDA kernels, built ahead, {library}"
    else:
        built = f"built ahead for compute capability 9.0, {library}"
        assert report["cuda_library"] == built
        assert report["backends"]["cuda"] == f"{built}, and torch finds no CUDA device here"
        assert report["gpus"] == []
    assert report["backends"]["cpu"] is None
    assert report["cuda_compiler"].startswith("none: there is no CUDA compiler: nvcc was not found")
    assert not (tmp_path / "cache").exists()


@needs_nvcc
def test_it_loads_without_cuda(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path / "installed")
    library = installed / "fastclip" / "_C_cuda.abi3.so"
    code = f"""
import torch
torch.ops.load_library({str(library)!r})
operators = torch.ops.fastclip_cuda
print(operators.source_hash(), "|", operators.launches())
print(operators.served([torch.ones(2), torch.ones(2)]).tolist())
"""
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    csrc = installed / "fastclip" / "csrc"
    assert done.stdout.splitlines() == [
        f"{_build_cuda.source_hash(csrc)} for 9.0 | 0",
        "[0, 0]",  # what lies on the CPU is not for it
    ]


def test_no_nvcc(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    reason = "there is no CUDA compiler: nvcc was not found in $CUDA_HOME/bin (none/bin)"
    settings = {"CUDA_HOME": "none", "FASTCLIP_BUILD_CUDA": "1"}
    done = build_wheel(Path(sys.executable), source, **settings)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"error: FASTCLIP_BUILD_CUDA=1, but {reason}"]


@pytest.mark.parametrize("demanded", ["1", ""], ids=["demanded", "by-itself"])
def test_an_architecture_that_is_none(demanded: str, tmp_path: Path, quick_compiler: str) -> None:
    source = copy_source(tmp_path / "source")
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    script(tmp_path / "cuda" / "bin" / "nvcc", "echo compute_90")
    settings = {"FASTCLIP_BUILD_CUDA": demanded, "TORCH_CUDA_ARCH_LIST": "Hoper"}
    settings |= {"CUDA_HOME": str(tmp_path / "cuda"), "CXX": quick_compiler}
    done = build_wheel(Path(sys.executable), source, **settings)
    reason = (
        "TORCH_CUDA_ARCH_LIST=Hoper: 'Hoper' is not a compute capability such as 8.0 or 9.0+PTX"
    )
    if demanded:
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"error: FASTCLIP_BUILD_CUDA=1, but {reason}"
    else:
        assert done.returncode == 0, done.stderr
        assert f"fastclip: _C_cuda is not built ahead: {reason}" in done.stdout.splitlines()


def test_an_nvcc_that_fails_is_left_out_with_a_note(tmp_path: Path, quick_compiler: str) -> None:
    source = copy_source(tmp_path / "source")
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    answers = "--version) echo release 12.9; exit;; --list-gpu-arch) echo compute_90; exit;;"
    nvcc = script(
        tmp_path / "cuda" / "bin" / "nvcc", f'case "$1" in {answers} esac; echo out of luck; exit 2'
    )
    settings = {"CUDA_HOME": str(tmp_path / "cuda"), "CXX": quick_compiler}
    done = build_wheel(Path(sys.executable), source, **settings)
    assert done.returncode == 0, done.stderr
    assert f"fastclip: _C_cuda is not built ahead: {nvcc} failed on " in done.stdout
    with zipfile.ZipFile(source / "dist" / done.stdout.splitlines()[-1]) as file:
        libraries = {name for name in file.namelist() if name.endswith(".so")}
    assert libraries == {"fastclip/_C.abi3.so"}


@needs_nvcc
@needs_audit
def test_it_is_stable(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path / "installed")
    for name in ("_C", "_C_cuda"):
        library = installed / "fastclip" / f"{name}.abi3.so"
        assert audited(library) == (True, "2.10.0", [])


def doctor(installed: Path, cwd: Path, **settings: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastclip", "doctor", "--json"]
    done = run(command, cwd, PYTHONPATH=str(installed), **settings)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
