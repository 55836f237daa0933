"""The kernels run by Triton's interpreter, in a process of its own: the variable that chooses it
counts when a kernel is defined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from fastclip.backends import triton as backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(backend.interpreted(), reason="this is that process")
@pytest.mark.parametrize(
    "arguments",
    [
        ["tests/triton_backend/interpreted/test_table.py"],
        ["tests/triton_backend/interpreted/test_kernels.py"],
        ["tests/test_ops.py", "-k", "triton"],
    ],
    ids=["case-table", "kernels", "operators"],
)
def test_interpreted(arguments: list[str]) -> None:
    # In Python what is too big for a float is a warning, on a GPU it is just infinity. And old
    # interpreters use numpy in ways that are deprecated.
    quiet = ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning", "-q"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *quiet, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-10000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
