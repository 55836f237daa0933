"""One batch on a GPU: the same faults, nothing changed, and no wait for it within forward()."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.monitor import compare_precisions, find_first_nonfinite
from tests.monitor.batch.cases import CASES, Case, Forward, batch, healthy
from tests.monitor.batch.photographs import photograph

Forbidden = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: no GPU here"
)

LOOKS = pytest.mark.parametrize(
    "look", [find_first_nonfinite, compare_precisions], ids=["origin", "precisions"]
)


@pytest.fixture(autouse=True)
def _on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_first_module_at_fault(case: Case) -> None:
    model, forward = case.build()
    assert find_first_nonfinite(model, forward) == case.origin


@LOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_changes(case: Case, look: Callable[[nn.Module, Forward], Any]) -> None:
    model, forward = case.build()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    before = photograph(model)
    look(model, forward)
    assert photograph(model) == before


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_values_of_each_precision(name: str, dtype: torch.dtype | None) -> None:
    """Dropout draws the same; sums of gradients on a GPU may round differently each time."""
    model, forward = healthy()
    state = torch.cuda.get_rng_state()
    report = compare_precisions(model, forward, [name])[name]
    torch.cuda.set_rng_state(state)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = forward()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm, rel=1e-3 if dtype else 1e-5)
    assert report.nonfinite is None


def test_overflow_in_fp16_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("0.weight"), 75.0)
    nn.init.constant_(model.get_parameter("1.0.weight"), 300.0)
    x = torch.ones(2, 4)
    reports = compare_precisions(model, lambda: model(x).float().mean())
    assert [report.finite for report in reports.values()] == [True, True, False]
    assert [report.nonfinite for report in reports.values()] == [None, None, "1.0"]


def test_the_modules_are_watched_without_a_wait(waiting_raises: Forbidden) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    x = batch(3, 4)
    model(x).sum().backward()  # what is loaded once

    def forward() -> Tensor:
        with waiting_raises():
            return model(x).sum()

    assert find_first_nonfinite(model, forward) is None
    assert all(report.finite for report in compare_precisions(model, forward).values())
