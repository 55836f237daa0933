"""How lists are cut into parts and which plans are kept: C++ without CUDA and torch."""

import subprocess
from pathlib import Path

from fastclip import _build
from tests import sanitizers
from tests.cuda_emulated.library import ROOT


def test_plan(tmp_path: Path) -> None:
    sanitizers.runtimes()  # or skip
    csrc = ROOT / "csrc"
    sources = [ROOT / "tests/cpp/plan_test.cpp", csrc / "cuda/plan.cpp", csrc / "layout.cpp"]
    program = tmp_path / "plan_test"
    command = [*_build.compiler_command(), "-std=c++17", *_build.SANITIZE, f"-I{csrc}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, text = done.stdout.split(" ", 1)
    assert text == "passed, 0 failed\n"
    assert int(passed) > 500_000  # it has run to the end
