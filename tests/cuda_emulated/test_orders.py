"""The same bits whatever the order in which blocks, warps and lanes run; and a wrong one is seen."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastclip.backends import Backend
from fastclip.testing.compare import bitwise_equal
from tests.cuda_emulated.library import ROOT, Device, build

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
