"""The case table. About 10 ms a tensor or chunk: small cases get every question, others a few."""

import functools
import math

import pytest

from fastclip.backends import Backend
from fastclip.testing import trials
from fastclip.testing.cases import BACKEND_CASES, Case
from fastclip.testing.trials import expected_total

every_case = pytest.mark.parametrize("case", BACKEND_CASES, ids=lambda case: case.id)


@functools.cache
def _light(case: Case) -> bool:
    tensors = case.tensors()
    return len(tensors) <= 12 and sum(x.numel() for x in tensors) <= 20_000


def _right(errors: dict[float, float]) -> None:
    assert {p: error for p, error in errors.items() if not error <= 1} == {}


@every_case
def test_measure(case: Case, triton: Backend) -> None:
    orders = (2.0, 0.0, 1.0, math.inf, 3.0) if _light(case) else (2.0,)
    _right({p: trials.measure(triton, case, p, "cpu") for p in orders})


@every_case
def test_clip(case: Case, triton: Backend) -> None:
    for p in (1.0, math.inf) if _light(case) else (2.0,):
        total = expected_total(case, p)
        half = total / 2 if math.isfinite(total) else 1.0
        _right({p: trials.clip_at(triton, case, p, half, "cpu")})


@every_case
def test_scale(case: Case, triton: Backend) -> None:
    if not _light(case):
        pytest.skip("clipped above")
    assert trials.scale(triton, case, "cpu") <= 1


SCALED = [case for case in BACKEND_CASES if case.id.startswith(("dtype/", "value/nan-inf-zero"))]


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.id)
def test_inv_scale(case: Case, triton: Backend) -> None:
    if not _light(case):
        pytest.skip("many tensors")
    _right({2.0: trials.clip_with_inv_scale(triton, case, 2.0, 1 / 3, "cpu")})
