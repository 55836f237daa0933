"""The case table on every backend, against the float64 reference."""

import math

import pytest
import torch

from fastclip.backends import Backend
from fastclip.testing import compare, reference64, trials
from fastclip.testing.cases import BACKEND_CASES, CASES, Case
from fastclip.testing.variants import Variant

CLIP_NORMS = {2.0, math.inf, 3.0}

every_case = pytest.mark.parametrize("case", BACKEND_CASES, ids=lambda case: case.id)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads are test_threads.py's subject; here they would only slow small tensors down."""
    torch.set_num_threads(1)


def _runs(case: Case, variant: Variant) -> None:
    if case.cpu_only and variant.device != "cpu":
        pytest.skip(f"{case.id}: no such address on {variant.device}")


def _right(errors: dict[float, float]) -> None:
    wrong = {
        f"p={p:g}": f"{error:.3g} x tolerance" for p, error in errors.items() if not error <= 1
    }
    assert not wrong


@every_case
def test_measure(case: Case, variant: Variant, opened: Backend) -> None:
    _runs(case, variant)
    _right({p: trials.measure(opened, case, p, variant.device) for p in variant.norm_types})


@every_case
def test_clip(case: Case, variant: Variant, opened: Backend) -> None:
    _runs(case, variant)
    norms = CLIP_NORMS & set(variant.norm_types)
    _right({p: trials.clip(opened, case, p, variant.device) for p in norms})


@every_case
def test_scale(case: Case, variant: Variant, opened: Backend) -> None:
    _runs(case, variant)
    assert trials.scale(opened, case, variant.device) <= 1


SCALED = [case for case in BACKEND_CASES if case.id.startswith(("dtype/", "value/nan-inf-zero"))]


@pytest.mark.parametrize("inv_scale", [2.0**-16, 1 / 3, 1.0])
@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.id)
def test_inv_scale(case: Case, inv_scale: float, variant: Variant, opened: Backend) -> None:
    _right(
        {
            p: trials.clip_with_inv_scale(opened, case, p, inv_scale, variant.device)
            for p in (2.0, 1.0, math.inf, 3.0)
        }
    )


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.id)
def test_skip(case: Case, variant: Variant, opened: Backend) -> None:
    _runs(case, variant)
    _right({p: trials.clip_skipping(opened, case, p, variant.device) for p in (2.0, math.inf, 3.0)})


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))


def test_a_case_is_the_same_every_time() -> None:
    for case in CASES:
        again = zip(case.tensors(), case.tensors(), strict=True)
        assert all(compare.bitwise_equal(a, b) for a, b in again), case.id


def test_reference_by_hand() -> None:
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([[0.0, math.nan, -math.inf, 12.0]])]
    assert reference64.row(grads[0], 2.0) == [25.0, 4.0, 0.0, 0.0, 0.0]
    assert reference64.row(grads[1], 0.0) == [3.0, 12.0, 1.0, 1.0, 1.0]
    assert reference64.total_norm([grads[0], torch.tensor([12.0])], 2.0) == 13.0
    assert reference64.total_norm([grads[0]], 1.0) == 7.0
    assert reference64.total_norm([grads[0]], math.inf) == 4.0
    assert reference64.total_norm([grads[0]], -math.inf) == 3.0
    assert reference64.total_norm([torch.zeros(3)], -1.0) == 0.0
    assert reference64.coefficient(5.0, 2.5) == 2.5 / 5.000001
    assert reference64.clipped([grads[0]], 2.0, 0.0)[0].tolist() == [0.0, -0.0]


class _Wrong:
    """The reference64 as a backend, with one mistake."""

    name = "wrong"

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def measure(self, grads, p, inv_scale):  # type: ignore[no-untyped-def]
        table = reference64.table(grads, p)
        if self.mistake == "norm":
            table[0, compare.POWER] *= 1 + 3e-6
        if self.mistake == "count":
            table[-1, compare.ZERO] += 1
        if self.mistake == "write":
            grads[0].view(-1)[0] = -grads[0].view(-1)[0]
        return table


@pytest.mark.parametrize(("mistake", "caught"), [("", 0), ("norm", 1), ("count", 1), ("write", 1)])
def test_the_trial_catches(mistake: str, caught: int) -> None:
    case = next(case for case in CASES if case.id == "shape/two-tensors-float32")
    error = trials.measure(_Wrong(mistake), case, 2.0, "cpu")  # type: ignore[arg-type]
    assert (error > 1) == bool(caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_scale_trial_catches_two_ulp(dtype: torch.dtype) -> None:
    before = torch.linspace(-2, 2, 1001, dtype=torch.float64).to(dtype)
    right = (before.double() * 0.3).to(dtype)
    assert compare.scale_error(right, before, 0.3) == 0
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    right.view(integer)[77] += 2
    assert compare.scale_error(right, before, 0.3) > 1
