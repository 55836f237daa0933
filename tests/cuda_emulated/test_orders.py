"""The same bits in whatever order blocks, warps and lanes run; and a wrong combine is seen."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastclip.backends import Backend
from fastclip.testing import trials
from fastclip.testing.cases import CASES
from fastclip.testing.compare import bitwise_equal
from tests.cuda_emulated.library import ROOT, SMALL_ARGUMENTS_ALONE, Device, build

ORDERS = 100


def _grads() -> list[Tensor]:
    big = torch.randn(100_000)
    big[[7, 50_000]] = torch.tensor([math.nan, 1e30])
    return [big, torch.randn(30_000).bfloat16(), *torch.randn(9, 500).half(), torch.randn(9000)]


@pytest.mark.parametrize("cooperative", [0, 1], ids=["two-launches", "cooperative"])
def test_the_same_bits_in_a_hundred_orders(cooperative: int, device: Device, cuda: Backend) -> None:
    grads = _grads()
    clipped = [grad.nan_to_num(0) for grad in grads]
    with device.having(cooperative=cooperative):
        table = cuda.measure(grads, 1.0, None)
        first = [grad.clone() for grad in clipped]
        results = cuda.clip_(first, 2.0, 1.0, None)
        for seed in range(1, ORDERS + 1):
            with device.having(seed=seed, host_threads=1 + seed % 2):
                assert bitwise_equal(cuda.measure(grads, 1.0, None), table), seed
                again = [grad.clone() for grad in clipped]
                for one, other in zip(cuda.clip_(again, 2.0, 1.0, None), results, strict=True):
                    assert bitwise_equal(one, other), seed
            assert all(map(bitwise_equal, again, first)), seed


RIGHT = "into.inf += other.inf;"
WRONG = "into.inf = other.inf;"


@pytest.mark.slow
def test_a_wrong_combine_is_caught(compiler: None, built: Device, tmp_path: Path) -> None:
    """In csrc/table.h, the one place where rows are combined."""
    case = next(case for case in CASES if case.id == "value/one-inf-at-borders-float32")
    assert trials.measure(built.backend(), case, 2.0, "cpu") <= 1
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    table = csrc / "table.h"
    assert table.read_text().count(RIGHT) == 1
    table.write_text(table.read_text().replace(RIGHT, WRONG))
    library = tmp_path / "wrong.so"
    build(library, csrc, ("-O0", *SMALL_ARGUMENTS_ALONE), "fastclip_cuda_wrong")
    wrong = Device(library, "fastclip_cuda_wrong").backend()
    assert trials.measure(wrong, case, 2.0, "cpu") == math.inf
