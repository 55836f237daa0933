"""Every function on every layout of DTensors, against the whole gradients on one process."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import layouts, measuring, models
from tests.distributed.measuring import Outcome, Report, Tensors
from tests.distributed.ranks import Pool, RanksFailed
from tests.test_torch_agreement import ulps_apart
from tests.training import differences, same

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
CLIPPING = (
    *("clip_grad_norm_", "clip_grad_norm_ or error", "clip_grads_with_norm_"),
    *("clip_grads_with_norm_ of torch", "clip_", "step"),
)
BACKENDS = ["cpu", "reference"]


@pytest.fixture(scope="module")
def reports(shared_ranks: Pool) -> Any:
    """Of every layout, made when it is first asked for: what each rank has to report."""
    made: dict[tuple[str, int], list[Report] | RanksFailed] = {}

    def get(name: str, size: int) -> list[Report]:
        if (name, size) not in made:
            try:
                made[name, size] = shared_ranks.run(
                    size, measuring.report, name, size, NORM_TYPES, BACKENDS
                )
            except RanksFailed as failure:  # of all tests of this layout, and not run again
                made[name, size] = failure
        result = made[name, size]
        if isinstance(result, RanksFailed):
            raise result
        return result

    return get


@pytest.fixture(params=layouts.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    chosen: tuple[str, int] = request.param
    return chosen


def what(outcome: Outcome) -> str:
    return f"{outcome.function} on {outcome.backend}, p={outcome.p}"


@pytest.mark.usefixtures("cpu_available")
def test_norms_are_those_of_the_whole_gradients(reports: Any, case: tuple[str, int]) -> None:
    report = reports(*case)[0]
    wholes = [report.whole]
    if layouts.LAYOUTS[case[0]].is_net:
        wholes.append(models.gradients())
    measured = [outcome for outcome in report.outcomes if outcome.total is not None]
    functions = {outcome.function for outcome in measured}
    assert functions >= {"clip_grad_norm_", "get_total_norm", "grad_stats", "measure", "clip_"}
    for outcome in measured:
        total = outcome.total
        assert type(total) is Tensor, what(outcome)
        assert total.dtype == torch.float32, what(outcome)
        assert total.shape == (), what(outcome)
        for whole in wholes:
            expected = measuring.norm(whole.values(), outcome.p)
            assert total.item() == pytest.approx(expected, rel=1e-6), what(outcome)


@pytest.mark.usefixtures("cpu_available")
def test_gradients_are_rescaled_as_in_one_process(reports: Any, case: tuple[str, int]) -> None:
    for rank, report in enumerate(reports(*case)):
        for outcome in report.outcomes:
            expected = rescaled(outcome, report)
            # a norm that has been rounded to float32 may move the result by one more
            ulps = 2 if outcome.function.startswith("clip_grads_with_norm_") else 1
            for name, grad in outcome.after.items():
                label = f"{what(outcome)}, rank {rank}: {name}"
                assert grad.dtype == report.held[name].dtype, label
                assert ulps_apart(grad, expected[name].to(grad.dtype)) <= ulps, label
            for name, moved in (outcome.moved or {}).items():
                # of parameters of at most 4, rounded once, over the rate of 0.5
                allowed = 4 * torch.finfo(outcome.after[name].dtype).eps
                error = largest(moved - expected[name])
                label = f"{what(outcome)}, rank {rank}: {name} moved by {error} too much"
                assert error <= allowed, label


def rescaled(outcome: Outcome, report: Report) -> Tensors:
    """What the function should leave of what the rank holds, in float64."""
    wide = {name: grad.double() for name, grad in report.held.items()}
    if outcome.function == "clip_grad_value_":
        bound = measuring.bound(outcome.limit, outcome.p)
        return {name: grad.clamp(-bound, bound) for name, grad in wide.items()}
    if outcome.function not in CLIPPING:
        return wide
    coef = outcome.limit / (measuring.norm(report.whole.values(), outcome.p) + 1e-6)
    assert coef < 1
    return {name: grad * coef for name, grad in wide.items()}


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@pytest.mark.usefixtures("cpu_available")
def test_statistics_of_layers_are_those_of_whole_tensors(
    reports: Any, case: tuple[str, int]
) -> None:
    report = reports(*case)[0]
    measured = [outcome for outcome in report.outcomes if outcome.layers is not None]
    assert {outcome.function for outcome in measured} >= {"grad_stats", "measure", "clip_"}
    for outcome in measured:
        layers = {layer.name: layer for layer in outcome.layers}
        assert list(layers) == list(report.whole), what(outcome)
        for name, grad in report.whole.items():
            layer, label = layers[name], f"{what(outcome)}: {name}"
            wide = grad.double()
            assert layer.numel == grad.numel(), label
            assert (layer.nan, layer.inf) == (0, 0), label
            assert layer.zero == int((grad == 0).sum()), label
            # partial ones are summed again, in another order
            tolerance = 1e-6 if name not in report.partial else 4e-6
            expected = measuring.norm([grad], outcome.p) if wide.numel() else 0.0
            assert layer.norm == pytest.approx(expected, rel=tolerance), label
            exact = 0.0 if name not in report.partial else tolerance
            assert layer.max_abs == pytest.approx(largest(wide), rel=exact, abs=0), label


@pytest.mark.usefixtures("cpu_available")
def test_every_rank_has_the_same_bits(reports: Any, case: tuple[str, int]) -> None:
    first, *others = reports(*case)
    for other in others:
        copies = [key for key in first.held if not differences(first.held[key], other.held[key])]
        for mine, theirs in zip(first.outcomes, other.outcomes, strict=True):
            for field in ("function", "total", "coef", "layers"):
                same(getattr(mine, field), getattr(theirs, field), f"{what(mine)}, {field}")
            for key in copies:
                same(mine.after[key], theirs.after[key], f"{what(mine)}, {key}")
