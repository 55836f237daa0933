"""The C++ backend under AddressSanitizer and UndefinedBehaviorSanitizer, over the case table."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from fastclip import _build
from fastclip.testing.cases import BACKEND_CASES
from fastclip.testing.variants import SIMD_LEVELS
from tests import sanitizers
from tests.conftest import VARIANTS

pytestmark = pytest.mark.slow

# Heap memory that torch allocated, read one element past its end; and an overflow of a signed int.
PLANTED = """
extern "C" float element(const float* x, long i) { return x[i]; }
extern "C" int sum(int a, int b) { return a + b; }
"""


@pytest.fixture(scope="module")
def preload() -> str:
    return sanitizers.runtimes()


@pytest.fixture(scope="module")
def planted(preload: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    source, library = folder / "planted.cpp", folder / "planted.so"
    source.write_text(PLANTED)
    command = [
        *_build.compiler_command(),
        *_build.SANITIZE,
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
    ]
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
    run = sanitizers.run(["-c", code], preload)
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
    run = sanitizers.run(["-m", "tests.sanitized_cases", str(sanitized), level], preload)
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"{len(BACKEND_CASES)} cases and" in run.stdout
