"""How csrc/cuda becomes a library: nvcc, the architectures, the commands, the names, the cache."""

import ctypes
import logging
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastclip import _build, _build_cuda
from fastclip._build_cuda import Arch
from tests.toolchain import KNOWN, Tools, script

TORCH_DIR = Path(torch.__file__).parent


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("8.0", [Arch(8, 0)]),
        ("9.0+PTX", [Arch(9, 0, ptx=True)]),
        ("8.0 9.0+PTX", [Arch(8, 0), Arch(9, 0, ptx=True)]),
        (" 12.0+PTX;8.0; 9.0a ", [Arch(8, 0), Arch(9, 0, "a"), Arch(12, 0, ptx=True)]),
        ("10.0f;8.0;8.0", [Arch(8, 0), Arch(10, 0, "f")]),
        ("Ampere 9.0", [Arch(8, 0), Arch(8, 6, ptx=True), Arch(9, 0)]),
        ("Hopper", [Arch(9, 0, ptx=True)]),
    ],
)
def test_architectures_are_written_as_for_torch(text: str, archs: list[Arch]) -> None:
    assert _build_cuda.parse(text) == archs
    assert _build_cuda.parse(_build_cuda.render(archs).replace(",", "")) == archs


@pytest.mark.parametrize("word", ["Amper", "8", "sm_80", "8.0+ptx", "8.0,9.0", "-8.0"])
def test_other_words_are_refused_by_name(word: str) -> None:
    with pytest.raises(_build.BuildError) as caught:
        _build_cuda.parse(f"9.0 {word}")
    assert str(caught.value) == (
        f"TORCH_CUDA_ARCH_LIST=9.0 {word}: {word!r} is not a compute capability "
        "such as 8.0 or 9.0+PTX"
    )


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("9.0+PTX", [(9, 0), (10, 0), (12, 1)], [(8, 9)]),
        ("9.0a", [(9, 0)], [(10, 0)]),
        ("10.0f+PTX", [(10, 0), (10, 3)], [(12, 0)]),
    ],
)
def test_where_code_runs(
    arch: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]
) -> None:
    [parsed] = _build_cuda.parse(arch)
    assert [parsed.runs_on(device) for device in (*runs, *does_not)] == (
        [True] * len(runs) + [False] * len(does_not)
    )


def test_default_architectures(tools: Tools) -> None:
    archs, left_out = _build_cuda.chosen()
    assert _build_cuda.render(archs) == "8.0, 9.0, 10.0, 12.0+PTX"
    assert left_out == []


def test_an_older_nvcc_leaves_out_what_it_does_not_know(tools: Tools) -> None:
    tools.nvcc("12.4", "80 86 90")
    archs, left_out = _build_cuda.chosen()
    assert _build_cuda.render(archs) == "8.0, 9.0+PTX"
    assert _build_cuda.render(left_out) == "10.0, 12.0+PTX"


def test_what_is_asked_for_is_not_left_out(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 7.2")
    with pytest.raises(_build.BuildError) as caught:
        _build_cuda.chosen()
    assert str(caught.value) == (
        "TORCH_CUDA_ARCH_LIST=8.0 7.2: nvcc 12.9 does not know 7.2, "
        f"only {KNOWN.replace(' ', ', ')}"
    )
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a;8.6")
    assert _build_cuda.chosen() == ([Arch(8, 6), Arch(9, 0, "a")], [])


def test_local_architectures(tools: Tools) -> None:
    assert _build_cuda.local([(9, 0), (8, 6), (9, 0)]) == [Arch(8, 6), Arch(9, 0)]
    # newer than nvcc: what the driver can compile; older than nvcc: nothing
    assert _build_cuda.local([(10, 3)]) == [Arch(10, 0, ptx=True)]
    with pytest.raises(_build.BuildError, match=r"nvcc 12\.9 does not know sm_70"):
        _build_cuda.local([(7, 0)])
    # one that is too old does not take the kernels from the other
    assert _build_cuda.local([(8, 9), (6, 1)]) == [Arch(8, 9)]
    assert _build_cuda.local([(7, 0), (9, 0)]) == [Arch(9, 0)]


def test_no_kernels_below_7_0(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.nvcc("12.4", "50 61 70 80")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.1;8.0")
    reason = "TORCH_CUDA_ARCH_LIST=6.1;8.0: the kernels need compute capability 7.0 or later, not"
    with pytest.raises(_build.BuildError, match=rf"^{re.escape(reason)} 6\.1$"):
        _build_cuda.chosen()
    assert _build_cuda.obstacle() == f"{reason} 6.1"
    with pytest.raises(_build.BuildError, match=r"^the kernels need .*, and this device has 6\.1$"):
        _build_cuda.local([(6, 1)])


def test_an_nvcc_that_does_not_say_its_version(tools: Tools) -> None:
    assert _build_cuda.obstacle() is None
    nvcc = script(tools.home / "bin" / "nvcc", "echo out of luck; exit 3")
    _build_cuda._asked.cache_clear()
    for call in (_build_cuda.version, _build_cuda.known):
        with pytest.raises(_build.BuildError) as caught:
            call()
        option = "--version" if call is _build_cuda.version else "--list-gpu-arch"
        assert str(caught.value) == f"{nvcc} failed on {option} (exit 3):\n  out of luck"
    script(nvcc, '[ "$1" = --version ] && echo nonsense || echo compute_90')
    _build_cuda._asked.cache_clear()
    assert _build_cuda.obstacle() == f"{nvcc} --version names no release: nonsense"


def test_where_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    on_path = script(tmp_path / "nvcc", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert _build_cuda.nvcc() == str(on_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert _build_cuda.nvcc() is None  # what CUDA_HOME names is not replaced by another
    assert _build_cuda.missing_nvcc() == (
        f"there is no CUDA compiler: nvcc was not found in $CUDA_HOME/bin ({tmp_path}/bin)"
    )
    own = script(tmp_path / "bin" / "nvcc", "exit 0")
    assert _build_cuda.nvcc() == str(own)
    assert _build_cuda.missing_nvcc() is None


def test_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: name != "nvcc" and real(name))
    reason = "there is no CUDA compiler: nvcc was not found on PATH and in /usr/local/cuda/bin"
    assert _build_cuda.missing_nvcc() == reason
    for call in (
        lambda: _build_cuda.build(tmp_path / "library.so", [Arch(8, 0)], torch_dir=TORCH_DIR),
        lambda: _build_cuda.cached_library("1.0", TORCH_DIR, [Arch(8, 0)]),
    ):
        with pytest.raises(_build.BuildError, match=re.escape(reason)):
            call()


def test_commands(tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAX_JOBS", "4")  # two files, so two architectures at once for each
    monkeypatch.setenv("CXX", f"{tmp_path}/host -DMINE")
    library = tmp_path / "library.so"
    _build_cuda.build(library, _build_cuda.parse("8.0 9.0+PTX"), torch_dir=TORCH_DIR)
    *compiled, linked = tools.calls()
    [device] = [line.split() for line in compiled if line.startswith("nvcc")]
    [host] = [line.split() for line in compiled if not line.startswith("nvcc")]
    assert device[:3] == ["nvcc", "-ccbin", f"{tmp_path}/host"]
    pairs = list(pairwise(device))
    assert {("-Xcompiler", f) for f in ("-DMINE", "-fPIC", "-fvisibility=hidden")} <= set(pairs)
    assert ("-gencode", "arch=compute_80,code=sm_80") in pairs
    assert ("-gencode", "arch=compute_90,code=[sm_90,compute_90]") in pairs
    assert "--threads=2" in device
    assert str(TORCH_DIR / "include") not in device
    assert host[0] == "-DMINE"
    assert {"-fPIC", str(TORCH_DIR / "include"), str(tools.csrc / "cuda/ops.cpp")} <= set(host)
    for command in (device, host):
        assert {"-std=c++17", "-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000"} <= set(command)
    assert "-shared -cudart static" in linked
    libraries = [word for word in linked.split() if word.startswith("-l")]
    assert libraries == ["-ltorch_cpu"]  # neither libtorch_cuda nor the driver
    assert _build_cuda.built_for(library, tools.csrc) == [Arch(8, 0), Arch(9, 0, ptx=True)]


def test_a_launcher_before_the_compiler_is_not_nvccs(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tools.folder / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{tools.folder}/ccache {tools.folder}/host -O1")
    host = str(tools.folder / "host")
    assert _build_cuda.nvcc_command()[1:] == ["-ccbin", host, "-Xcompiler", "-O1"]


def test_the_words_of_cxx(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    host = str(tools.folder / "host")
    monkeypatch.setenv("CXX", f"env A=1 B=2 {host} -DA=1,2")
    command = _build_cuda.nvcc_command()
    assert command[1:] == ["-ccbin", host, "-Xcompiler", "-DA=1\\,2"]


def test_each_library_has_a_hash_of_its_own_files(tools: Tools) -> None:
    def hashes() -> tuple[str, str]:
        return _build.source_hash(tools.csrc), _build_cuda.source_hash(tools.csrc)

    cpu, gpu = hashes()
    (tools.csrc / "cuda/new.cuh").write_text("//\n")
    assert hashes()[0] == cpu
    assert hashes()[1] != gpu
    (tools.csrc / "cuda/new.cuh").unlink()
    for name in ("ops.cpp", "cpu/kernels.cpp"):
        (tools.csrc / name).write_text("//\n")
        assert hashes()[0] != cpu
        assert hashes()[1] == gpu
        (tools.csrc / name).write_text("")
    (tools.csrc / "table.h").write_text("//\n")  # serves both
    assert hashes()[0] != cpu
    assert hashes()[1] != gpu


def test_every_included_file_is_hashed() -> None:
    csrc = _build.existing_source_dir()
    hashed = set(_build_cuda.files(csrc))
    assert set(_build_cuda.sources(csrc)) <= hashed
    for path in hashed:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            found = [folder / name for folder in (path.parent, csrc) if (folder / name).is_file()]
            assert found, f"{path.name} includes {name}"
            assert found[0].resolve() in hashed, f"{path.name} includes {name}"


def test_compiled_once_for_each_set_of_tools(
    tools: Tools, caplog: pytest.LogCaptureFixture
) -> None:
    def library(torch_version: str = "2.13.0", arch: str = "9.0") -> Path:
        return _build_cuda.cached_library(torch_version, TORCH_DIR, _build_cuda.parse(arch))

    with caplog.at_level(logging.WARNING, "fastclip"):
        first = library()
    assert caplog.messages == [
        "fastclip: compiling the CUDA kernels once for compute capability 9.0 and torch 2.13.0 "
        f"(up to a minute), into {tools.folder / 'cache'}"
    ]
    n_calls = len(tools.calls())
    assert library() == first
    assert len(tools.calls()) == n_calls
    others = [library(torch_version="2.14.1"), library(arch="8.0"), library(arch="9.0+PTX")]
    tools.nvcc("13.0")
    others.append(library())
    tools.host("2")
    others.append(library())
    (tools.csrc / "cuda/kernels.cu").write_text("//\n")
    others.append(library())
    assert len({first, *others}) == 7


def test_a_failing_nvcc_shows_its_message(tools: Tools, tmp_path: Path) -> None:
    text = (tools.home / "bin" / "nvcc").read_text()
    failing = text.replace('echo "nvcc $@"', "echo kernels.cu: out of luck; exit 2 #")
    (tools.home / "bin" / "nvcc").write_text(failing)
    with pytest.raises(_build.BuildError, match=r"(?s)failed on .*kernels\.cu .*out of luck"):
        _build_cuda.build(tmp_path / "out" / "library.so", [Arch(8, 0)], torch_dir=TORCH_DIR)
    assert list((tmp_path / "out").iterdir()) == []


TOY = """
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
extern "C" __attribute__((visibility("default"))) int device_count() {
  int n = 0;
  twice<<<1, 32>>>(nullptr);
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
"""


@pytest.mark.skipif(
    bool(_build_cuda.missing_nvcc()), reason=f"no CUDA is compiled: {_build_cuda.missing_nvcc()}"
)
def test_a_real_library_needs_no_cuda_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "csrc/cuda/toy.cu").write_text(TOY)
    monkeypatch.setattr(_build, "source_dir", lambda: tmp_path / "csrc")
    library = tmp_path / "library.so"
    _build_cuda.build(library, _build_cuda.parse("9.0"), torch_dir=TORCH_DIR)
    assert ctypes.CDLL(str(library)).device_count() == torch.cuda.device_count()
    if tool := shutil.which("readelf"):
        said = subprocess.run([tool, "-d", "-W", "--dyn-syms", library], capture_output=True)
        needed = re.findall(r"NEEDED.*\[(.*?)\]", said.stdout.decode())
        assert needed
        assert not [name for name in needed if "cuda" in name]
        symbols = re.findall(
            r"\d+: (?!0{16}).*(?:GLOBAL|WEAK) .* (\w+)$", said.stdout.decode(), re.M
        )
        assert "device_count" in symbols
        assert not [name for name in symbols if name.startswith(("cuda", "__cuda"))]
