"""The C++ library keeps to torch's stable ABI, from torch 2.10 on; the CUDA one is audited beside
the wheel that it is in."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastclip import _build

AUDIT = "from torch_abi_audit.cli import main; raise SystemExit(main())"

needs_audit = pytest.mark.skipif(
    importlib.util.find_spec("torch_abi_audit") is None, reason="torch-abi-audit is not installed"
)


def audited(library: Path) -> tuple[bool, str, list[str]]:
    """Whether it is stable, the oldest torch it runs with, and what is not known to be stable."""
    command = [sys.executable, "-c", AUDIT, "--json", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [found] = json.loads(done.stdout)["bundled_libs"]
    report = found["torch"]
    unknown = [*report["unstable_symbols"], *report["unknown_shim_symbols"]]
    return report["stable"], report["min_torch_version"], unknown


@needs_audit
def test_the_cpu_library_is_stable() -> None:
    if reason := _build.missing_compiler():
        pytest.skip(reason)
    library = _build.cached_library(torch.__version__, Path(torch.__file__).resolve().parent)
    assert audited(library) == (True, "2.10.0", [])


@needs_audit
def test_another_library_is_not() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    stable, _, unknown = audited(library)
    assert not stable
    assert unknown
