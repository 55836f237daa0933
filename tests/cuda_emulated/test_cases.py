"""The case table through the CUDA kernels, emulated."""

import math

import pytest
import torch

from fastclip.backends import Backend
from fastclip.backends.lists import NORMS
from fastclip.testing import trials
from fastclip.testing.cases import BACKEND_CASES, Case
from tests.cuda_emulated.library import Device

pytestmark = pytest.mark.slow

SERVED = [
    case for case in BACKEND_CASES if not any(map(torch.is_complex, case.tensors()))
]  # the reference has the others
every_case = pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)


@every_case
def test_measure(case: Case, cuda: Backend) -> None:
    errors = {p: trials.measure(cuda, case, p, "cpu") for p in NORMS}
    assert max(errors.values()) <= 1, errors


@every_case
def test_clip(case: Case, device: Device, cuda: Backend) -> None:
    total = trials.expected_total(case, 2.0)
    half = total / 2 if math.isfinite(total) else 1.0
    assert trials.clip_at(cuda, case, 2.0, half, "cpu") <= 1
    with device.having(cooperative=0):
        for max_norm in (half, 2 * half + 1):
            assert trials.clip_at(cuda, case, 2.0, max_norm, "cpu") <= 1


@every_case
def test_scale(case: Case, cuda: Backend) -> None:
    assert trials.scale(cuda, case, "cpu") <= 1


SCALED = [case for case in SERVED if case.id.startswith(("dtype/", "value/nan-inf-zero"))]


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.id)
def test_inv_scale(case: Case, cuda: Backend) -> None:
    errors = {
        (p, inv_scale): trials.clip_with_inv_scale(cuda, case, p, inv_scale, "cpu")
        for p in NORMS
        for inv_scale in (2.0**-16, 1 / 3)
    }
    assert max(errors.values()) <= 1, errors
