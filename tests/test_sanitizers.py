"""The C++ backend under AddressSanitizer and UndefinedBehaviorSanitizer, over the case table."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastclip import _build
from fastclip.testing.cases import BACKEND_CASES
from fastclip.testing.variants import SIMD_LEVELS
from tests.conftest import VARIANTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

# Heap memory that torch allocated, read one element past its end; and an overflow of a signed int.
PLANTED = """
extern "C" float element(const float* x, long i) { return x[i]; }
extern "C" int sum(int a, int b) { return a + b; }
"""


def _command() -> list[str]:
    return (_build.compiler() or "").split()


def _runtimes() -> list[str] | None:
    """The shared runtimes that must be loaded before anything else, or None if there are none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*_command(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not Path(path).is_absolute():  # a compiler that has none repeats the bare name
            return None
        found.append(path)
    return found


@pytest.fixture(scope="module")
def preload() -> str:
    if not _command():
        pytest.skip(str(_build.missing_compiler()))
    runtimes = _runtimes() if sys.platform == "linux" else None
    if runtimes is None:
        pytest.skip(f"{_command()[0]} has no shared libasan and libubsan")
    return " ".join(runtimes)


def _run(arguments: list[str], preload: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself never frees all it has
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # bytearrays get guarded memory too
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def planted(preload: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    source, library = folder / "planted.cpp", folder / "planted.so"
    source.write_text(PLANTED)
    command = [*_command(), *_build.SANITIZE, "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("element(address, ctypes.c_long(9)); library.sum(2**31 - 2, 1)", ""),
        ("element(address, ctypes.c_long(10))", "heap-buffer-overflow"),
        ("sum(2**31 - 1, 1)", "signed integer overflow"),
    ],
    ids=["no-mistake", "one-past-the-end", "overflow"],
)
def test_a_planted_mistake_is_caught(planted: Path, preload: str, call: str, report: str) -> None:
    assert ctypes.sizeof(ctypes.c_int) == 4
    code = f"""
import ctypes, torch
library = ctypes.CDLL({str(planted)!r})
x = torch.zeros(10)
address = ctypes.c_void_p(x.data_ptr())
library.{call}
print("not caught")
"""
    run = _run(["-c", code], preload)
    assert ("not caught" in run.stdout) == (report == "")
    assert (run.returncode != 0) == (report != "")
    assert report in run.stderr


@pytest.fixture(scope="module")
def sanitized(preload: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("sanitized") / "fastclip.so"
    _build.build(library, torch_dir=Path(torch.__file__).resolve().parent, sanitize=True)
    return library


@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_case_table(level: str, sanitized: Path, preload: str) -> None:
    chosen = next(variant for variant in VARIANTS if variant.simd == level)
    if chosen.unavailable:
        pytest.skip(f"{level}: {chosen.unavailable}")
    run = _run(["-m", "tests.sanitized_cases", str(sanitized), level], preload)
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"{len(BACKEND_CASES)} cases and" in run.stdout
