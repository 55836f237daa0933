"""tests/cuda_on_cpu.h: CUDA kernels with known answers, and with planted faults, on the host."""

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.test_kernels import can_link

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "tests" / "cpp" / f"cuda_on_cpu_{name}.cu" for name in ("test", "faults")]
FLAGS = [
    *("-std=c++17", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-sign-compare", "-Wno-unknown-pragmas"),  # as nvcc does
    *("-DFASTCLIP_CUDA_ON_CPU", "-include", str(ROOT / "tests" / "cuda_on_cpu.h"), "-x", "c++"),
]

# Compilers of which the first that is installed is taken, flags, and what runs the program.
BUILDS: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "plain": (("g++",), ["-O2", "-fPIC", "-fvisibility=hidden"], []),
    "address": (
        ("g++",),
        ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        [],
    ),
    "clang++": (("clang++", "clang++-14"), ["-O1"], []),
    "aarch64": (("aarch64-linux-gnu-g++",), ["-O1", "-static"], ["qemu-aarch64-static"]),
}

SOUND = ("sums", "cooperative", "refused", "warps", "parameters", "half", "bfloat16")

# What stops a planted fault; {} is where something waits.
SITE = r"\(\S+cuda_on_cpu_faults\.cu:\d+\)"
THREADS = "threads of block \\d wait at different barriers: "
STOPPED = {
    "different_barriers": THREADS + "0-15 at __syncthreads {}, 16-63 at __syncthreads {}",
    "barrier_and_vote": THREADS + "0-31 at __syncthreads {}, 32-63 at __syncthreads_or {}",
    "early_return": THREADS + "0-39 at __syncthreads {}, 40 returned, 41-63 at __syncthreads {}",
    "different_shuffles": THREADS
    + "0-4 at __shfl_xor_sync {}, 5 at __shfl_down_sync {}, 6-36 at __shfl_xor_sync {}, .*",
    "shuffle_of_half": "__shfl_down_sync {} for part of a warp: mask 0xffff",
    "shuffle": "__shfl_down_sync {} reads lane 16 of a warp of 16",
    "grid_barrier": r"this_grid\(\)\.sync {} in a launch that is not cooperative",
    "grid_barrier_of_some": r"blocks wait at different barriers: 1 (returned, block 1 at "
    r"this_grid\(\)\.sync {}|at this_grid\(\)\.sync {}, block 0 returned)",
    "grid_barrier_of_some_threads": THREADS + r"0 returned, 1-31 at this_grid\(\)\.sync {}",
    "misaligned": r"block 0, thread 0: address 0x\w+ is not a multiple of 16 in T "
    r"cuda_on_cpu::load\(const T\*\) \[with T = float4\]",
    "too_large": "a kernel has 32772 bytes of parameters, more than 32764",
    "unknown_control": "no control or counter is named 'sm_cuont'",
}
SANITIZED = {
    "read_past_end": "AddressSanitizer: heap-buffer-overflow .*READ of size 4 ",
    "write_past_end": "AddressSanitizer: heap-buffer-overflow .*WRITE of size 4 ",
    "write_past_shared": "AddressSanitizer: use-after-poison .*WRITE of size 4 ",
    "index_past_shared": r"index 32 out of bounds for type 'float \[32\]'",
}


def run_two(commands: list[list[str]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(functools.partial(subprocess.run, check=True), commands))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Compiles the sources in one of the ways of BUILDS, once; returns what runs the program."""

    @functools.cache
    def build(name: str) -> list[str]:
        compilers, flags, runner = BUILDS[name]
        compiler = next(filter(shutil.which, compilers), None)
        if compiler is None:
            pytest.skip(f"{' and '.join(compilers)}: not installed")
        for tool in runner:
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not installed")
        folder = tmp_path_factory.mktemp(name)
        if not can_link(compiler, flags, folder):
            pytest.skip(f"{compiler} cannot link with {' '.join(flags)}")
        objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
        command = [compiler, *flags, *FLAGS, "-c"]
        run_two([[*command, str(s), "-o", o] for s, o in zip(SOURCES, objects, strict=True)])
        link = [compiler, *flags, *objects, "-pthread", "-o"]
        subprocess.run([*link, str(folder / "program")], check=True)
        if name == "plain":
            subprocess.run([*link, str(folder / "library.so"), "-shared"], check=True)
        return [*runner, str(folder / "program")]

    return build


def run(command: list[str], case: str) -> "subprocess.CompletedProcess[str]":
    folder = Path(command[-1]).parent
    command = [*command, case]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=folder
    )


@pytest.mark.parametrize("case", SOUND)
@pytest.mark.parametrize("name", BUILDS)
def test_known_answers(name: str, case: str, build: Callable[[str], list[str]]) -> None:
    done = run(build(name), case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{case}: as expected\n")


@pytest.mark.parametrize("case", STOPPED)
@pytest.mark.parametrize("name", ["plain", "address"])
def test_faults_are_stopped(name: str, case: str, build: Callable[[str], list[str]]) -> None:
    done = run(build(name), case)
    assert done.returncode == -6, done.stdout + done.stderr
    message = f"cuda_on_cpu: {STOPPED[case].replace('{}', SITE)}"
    assert re.fullmatch(message, done.stderr.rstrip("\n")), done.stderr


@pytest.mark.parametrize("case", SANITIZED)
def test_faults_are_seen_by_sanitizers(case: str, build: Callable[[str], list[str]]) -> None:
    done = run(build("address"), case)
    assert done.returncode != 0
    assert re.search(SANITIZED[case], done.stderr, re.DOTALL), done.stdout + done.stderr


def test_library_is_driven_by_ctypes(build: Callable[[str], list[str]]) -> None:
    library = ctypes.CDLL(str(Path(build("plain")[0]).with_name("library.so")))
    library.cuda_on_cpu_get.restype = ctypes.c_longlong
    library.cuda_on_cpu_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
    storage = (ctypes.c_float * 1004)()
    start = -ctypes.addressof(storage) % 16 // 4
    x = (ctypes.c_float * 1000).from_buffer(storage, 4 * start)
    x[:] = [float(i) for i in range(1000)]
    library.cuda_on_cpu_set(b"launches", 0)  # libraries of one process share the device
    for seed in range(10):
        total = ctypes.c_float()
        library.cuda_on_cpu_seed(seed)
        library.cuda_on_cpu_set(b"host_threads", 1 + seed % 3)
        library.cuda_on_cpu_set(b"bytes_read", 0)
        assert library.sum(x, 1000, 5, ctypes.byref(total)) == 0
        assert total.value == 499_500
        assert library.cuda_on_cpu_get(b"bytes_read") == 4 * (1000 + 5)
    assert library.cuda_on_cpu_get(b"launches") == 10


def test_nvcc_compiles_the_same_sources(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-c"]
    run_two([[*command, str(s), "-o", str(tmp_path / f"{s.stem}.o")] for s in SOURCES])
