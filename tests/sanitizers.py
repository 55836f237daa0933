"""Runs Python with the runtimes of AddressSanitizer and UndefinedBehaviorSanitizer loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastclip import _build

ROOT = Path(__file__).resolve().parent.parent


def runtimes() -> str:
    """What must be loaded before anything else; skips where there is none, with the reason."""
    if reason := _build.missing_compiler():
        pytest.skip(reason)
    compiler = _build.compiler_command()
    found = []
    for name in ("libasan.so", "libubsan.so") if sys.platform == "linux" else ():
        command = [*compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if Path(path).is_absolute():  # a compiler that has none repeats the bare name
            found.append(path)
    if len(found) < 2:
        pytest.skip(f"{compiler[0]} has no shared libasan and libubsan")
    return " ".join(found)


def run(arguments: list[str], preload: str) -> "subprocess.CompletedProcess[str]":
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
