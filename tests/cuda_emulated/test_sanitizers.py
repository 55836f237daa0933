"""The CUDA kernels, emulated, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from pathlib import Path

import pytest

from fastclip import _build
from tests import sanitizers
from tests.cuda_emulated.library import ROOT, SMALL_ARGUMENTS_ALONE, build

pytestmark = pytest.mark.slow


def test_case_table(compiler: None, tmp_path: Path) -> None:
    preload = sanitizers.runtimes()
    library = tmp_path / "fastclip_cuda.so"
    build(library, ROOT / "csrc", (*_build.SANITIZE, "-g1", *SMALL_ARGUMENTS_ALONE))
    run = sanitizers.run(["-m", "tests.cuda_emulated.sanitized_cases", str(library)], preload)
    assert run.returncode == 0, run.stderr[-4000:]
    n, what = run.stdout.split()
    assert what == "cases"
    assert int(n) > 150
