"""Run by test_sanitizers.py with the sanitizers' runtimes loaded: part of the case table.

Argument: the library to use. Prints how many cases it has run; any report ends the process.
"""

import sys
from pathlib import Path

import torch

from fastclip.backends.lists import NORMS
from fastclip.testing.cases import BACKEND_CASES
from tests.cuda_emulated.library import Device

MOST_TENSORS, MOST_ELEMENTS = 40, 70_000  # of a case: fibers are slow here


def main(library: Path) -> None:
    device = Device(library)
    device.set("sm_count", 1)
    cuda = device.backend()
    cases = [
        case
        for case in BACKEND_CASES
        if len(x := case.tensors()) <= MOST_TENSORS and sum(map(torch.numel, x)) <= MOST_ELEMENTS
    ]
    for i, case in enumerate(cases):
        device.set("cooperative", i % 2)
        grads = case.tensors()
        cuda.measure(grads, NORMS[i % 4], None)
        cuda.clip_(grads, 2.0, 1e-3, None)
        each = torch.linspace(0.5, 1.0, len(grads), dtype=torch.float64)
        cuda.scale_(case.tensors(), each)
    many = list(torch.randn(600, 3).unbind())  # more addresses than fit into the arguments
    cuda.clip_(many, 2.0, 1e-3, None)
    cuda.clip_([grad.clone() for grad in many], 2.0, 1e-3, None)
    print(len(cases), "cases")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
