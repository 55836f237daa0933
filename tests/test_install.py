"""The installed wheel, from an empty folder: both kinds of wheel, and what can stand in the way.

The compiler here is the real one without optimisation: what is tested is which library serves.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import fastclip
from fastclip import _build

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("pyproject.toml", "setup.py", "LICENSE", "README.md", "fastclip", "csrc")
FASTCLIP = ("BACKEND", "BUILD", "BUILD_CUDA", "CACHE", "SIMD")
OWN_VARIABLES = (*(f"FASTCLIP_{name}" for name in FASTCLIP), "CXX", "TORCH_CUDA_ARCH_LIST")

BUILD_WHEEL = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""

CLIP = """
import json
import torch
import fastclip

parameter = torch.nn.Parameter(torch.zeros(3))
parameter.grad = torch.tensor([3.0, 0.0, 4.0])
norm = fastclip.clip_grad_norm_([parameter], 1.0)
print(json.dumps({
    "file": fastclip.__file__,
    "norm": norm.item(),
    "grad": [round(x, 5) for x in parameter.grad.tolist()],
    "backend": fastclip.backends.explain()["cpu"],
    "libraries": [str(path) for path in torch.ops.loaded_libraries],
}))
"""

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    _build.compiler() is None,
    reason=f"the C++ kernels cannot be built: {_build.missing_compiler()}",
)


def environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    return {**inherited, **changes}


def run(command: list[str], cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=300,
    )


def build_wheel(python: Path, source: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """What an installer runs after it has prepared the build environment of `python`."""
    source.joinpath("dist").mkdir(exist_ok=True)
    return run([str(python), "-c", BUILD_WHEEL, "dist"], source, **changes)


def install(wheel: Path, target: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = run([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], wheel.parent)
    assert done.returncode == 0, done.stderr
    return target


def clip(installed: Path, empty: Path, **changes: str) -> tuple[dict[str, Any], str]:
    """What CLIP says under the installed package, and what stood on the standard error stream."""
    empty.mkdir(exist_ok=True)
    done = run([sys.executable, "-c", CLIP], empty, PYTHONPATH=str(installed), **changes)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert Path(said["file"]) == installed / "fastclip" / "__init__.py"
    assert said["norm"] == 5.0
    assert said["grad"] == [0.6, 0.0, 0.8]
    assert list(empty.iterdir()) == []
    return said, done.stderr


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    wrapper = tmp_path_factory.mktemp("compiler") / "quick"
    wrapper.write_text(f'#!/bin/sh\nexec {_build.compiler()} "$@" -O0\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def copy_source(target: Path) -> Path:
    target.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / part, target / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, target / part)
    return target


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with setuptools alone, as installers make for a build."""
    folder = tmp_path_factory.mktemp("torchless") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    library = importlib.metadata.distribution("setuptools")
    [packages] = folder.glob("lib/python*/site-packages")
    for part in {file.parts[0] for file in library.files or ()} - {"..", "__pycache__"}:
        packages.joinpath(part).symlink_to(Path(str(library.locate_file(part))).resolve())
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory, torchless: Path) -> Path:
    source = copy_source(tmp_path_factory.mktemp("pure") / "source")
    done = build_wheel(torchless, source)
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory: pytest.TempPathFactory, quick_compiler: str) -> Path:
    source = copy_source(tmp_path_factory.mktemp("native") / "source")
    settings = {"CXX": quick_compiler, "FASTCLIP_BUILD": "1", "FASTCLIP_BUILD_CUDA": "0"}
    done = build_wheel(Path(sys.executable), source, **settings)
    assert done.returncode == 0, done.stderr
    assert "fastclip: _C.abi3.so is built ahead, for CPUs" in done.stdout.splitlines()
    assert "fastclip: _C_cuda is not built ahead: FASTCLIP_BUILD_CUDA=0" in done.stdout
    return source / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory, pure_wheel: Path) -> Path:
    return install(pure_wheel, tmp_path_factory.mktemp("installed-pure"))


def test_pure_wheel(pure_wheel: Path) -> None:
    assert pure_wheel.name == f"torch_fastclip-{fastclip.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(pure_wheel) as wheel:
        names = set(wheel.namelist())
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        fields = Parser().parsestr(wheel.read(metadata).decode())
    csrc = ROOT / "csrc"
    sources = [p for p in csrc.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert {f"fastclip/csrc/{path.relative_to(csrc).as_posix()}" for path in sources} <= names
    assert "fastclip/py.typed" in names
    assert not [name for name in names if name.endswith(".so") or "test_" in name]
    needed = [line for line in fields.get_all("Requires-Dist") or () if "extra" not in line]
    assert needed == ["torch>=2.10"]


@needs_compiler
def test_pure_wheel_compiles_once_at_first_use(
    pure: Path, quick_compiler: str, tmp_path: Path
) -> None:
    settings = {"CXX": quick_compiler, "FASTCLIP_CACHE": str(tmp_path / "cache")}
    first, messages = clip(pure, tmp_path / "empty", **settings)
    assert messages.startswith("fastclip: compiling the C++ kernels once for torch ")
    assert len(messages.splitlines()) == 1
    assert first["backend"][0] == "cpu"
    [library] = (tmp_path / "cache").glob("*.so")
    assert first["libraries"] == [str(library)]
    assert clip(pure, tmp_path / "empty", **settings) == (first, "")


@needs_compiler
def test_native_wheel(native_wheel: Path, tmp_path: Path) -> None:
    name, version, *tag = native_wheel.stem.split("-")
    assert (name, version, tag[:2]) == ("torch_fastclip", fastclip.__version__, ["cp310", "abi3"])
    installed = install(native_wheel, tmp_path / "installed")
    said, messages = clip(
        installed, tmp_path / "empty", CXX="none", FASTCLIP_CACHE=str(tmp_path / "cache")
    )
    assert messages == ""
    assert said["backend"][0] == "cpu"
    assert said["libraries"] == [str(installed / "fastclip" / "_C.abi3.so")]
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_stale_prebuilt_library_is_not_used(
    native_wheel: Path, quick_compiler: str, tmp_path: Path
) -> None:
    installed = install(native_wheel, tmp_path / "installed")
    with (installed / "fastclip" / "csrc" / "table.h").open("a") as header:
        header.write("\n")
    cache = tmp_path / "cache"
    said, _ = clip(installed, tmp_path / "empty", CXX=quick_compiler, FASTCLIP_CACHE=str(cache))
    assert said["backend"][0] == "cpu"
    assert said["libraries"] == [str(path) for path in cache.glob("*.so")]
    said, _ = clip(installed, tmp_path / "empty", CXX="none", FASTCLIP_CACHE=str(cache))
    assert said["backend"][0] == "reference"
    assert "was built from other sources" in said["backend"][1]
    assert said["libraries"] == []


def test_without_a_compiler_the_reference_serves_and_says_why(pure: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    said, messages = clip(
        pure, tmp_path / "empty", PATH=str(tmp_path / "bin"), FASTCLIP_CACHE=str(tmp_path / "cache")
    )
    reason = "there is no C++ compiler: none of c++, g++, clang++ is on PATH"
    assert said["backend"][0] == "reference"
    assert reason in said["backend"][1]
    assert said["libraries"] == []
    assert reason in messages  # once, without being asked: it costs the user speed
    assert len(messages.splitlines()) == 1


@needs_compiler
def test_unusable_cache_folder_is_a_reason_not_a_crash(pure: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    said, _ = clip(pure, tmp_path / "empty", FASTCLIP_CACHE=str(cache))
    assert said["backend"][0] == "reference"
    assert f"the folder {cache} cannot be used: Not a directory" in said["backend"][1]


def test_asking_for_what_cannot_be_built_is_an_error(pure: Path, tmp_path: Path) -> None:
    changes = {"CXX": "none", "FASTCLIP_BACKEND": "cpu", "FASTCLIP_CACHE": str(tmp_path / "cache")}
    done = run([sys.executable, "-c", CLIP], tmp_path, PYTHONPATH=str(pure), **changes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: ")
    assert "there is no C++ compiler: CXX=none was not found" in done.stderr


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        pytest.param(
            {"FASTCLIP_BUILD": "1"},
            "error: FASTCLIP_BUILD=1, but there is no torch in the build environment "
            "(see pip's --no-build-isolation)",
            id="no torch",
        ),
        pytest.param(
            {"FASTCLIP_BUILD": "yes"},
            "error: FASTCLIP_BUILD=yes is neither 0 nor 1",
            id="unknown value",
        ),
        pytest.param(
            {"FASTCLIP_BUILD_CUDA": "1"},
            "error: FASTCLIP_BUILD_CUDA=1, but there is no torch in the build environment "
            "(see pip's --no-build-isolation)",
            id="no torch for CUDA",
        ),
        pytest.param(
            {"FASTCLIP_BUILD_CUDA": "on"},
            "error: FASTCLIP_BUILD_CUDA=on is neither 0 nor 1",
            id="unknown value for CUDA",
        ),
    ],
)
def test_build_that_cannot_be_met_stops_with_one_line(
    settings: dict[str, str], line: str, torchless: Path, tmp_path: Path
) -> None:
    done = build_wheel(torchless, copy_source(tmp_path / "source"), **settings)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [line]


def test_build_without_a_compiler(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    python = Path(sys.executable)
    done = build_wheel(python, source, CXX="none", FASTCLIP_BUILD="1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: FASTCLIP_BUILD=1, but there is no C++ compiler: CXX=none was not found"
    ]
    done = build_wheel(python, source, CXX="none")
    assert done.returncode == 0, done.stderr
    *said, wheel = done.stdout.splitlines()
    assert wheel.endswith("-py3-none-any.whl")
    for name in ("_C", "_C_cuda"):
        assert (
            f"fastclip: {name} is not built ahead: there is no C++ compiler: CXX=none was not found"
        ) in said
