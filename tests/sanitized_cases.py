"""Run by test_sanitizers.py with the sanitizers' runtimes loaded: the case table, in C++.

Arguments: the library to use, and the SIMD level. Prints what it has done; any sanitizer report
ends the process.
"""

import sys
from pathlib import Path

import torch

from fastclip import _build
from fastclip.backends import native
from fastclip.testing.cases import BACKEND_CASES
from fastclip.testing.variants import SIMD_NORM_TYPES


def main(library: Path, level: str) -> None:
    native.LIBRARY = library.with_name("none built ahead")
    _build.cached_library = lambda *_: library
    native.simd(level)
    backend = native.provide()
    assert backend.quick_measure_units is not None
    assert backend.quick_scale_units_ is not None
    assert str(library) in native.description()
    large = [case for case in BACKEND_CASES if sum(x.numel() for x in case.tensors()) > 50_000]
    for threads, cases, norms in ((1, BACKEND_CASES, SIMD_NORM_TYPES), (3, large, (2.0,))):
        torch.set_num_threads(threads)
        for case in cases:
            grads = case.tensors()
            for p in norms:
                backend.measure(grads, p, None)
            backend.clip_(grads, 2.0, 1e-3, None)
            each = torch.linspace(0.5, 1.0, len(grads), dtype=torch.float64)
            backend.scale_(case.tensors(), each)
            if measured := backend.quick_measure_units(grads, 2.0, None):
                coefs = torch.linspace(0.5, 1.0, len(measured[1]), dtype=torch.float64)
                assert backend.quick_scale_units_(case.tensors(), coefs)
    print(len(BACKEND_CASES), "cases and", len(large), "large ones again with threads")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
