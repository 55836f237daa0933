"""Process groups: models split by hand, against one process with the whole model."""

import math

import pytest
import torch

from tests.distributed import measuring, stages
from tests.distributed.ranks import Pool
from tests.test_torch_agreement import ulps_apart
from tests.training import same

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
SPREAD = 2e-6  # of sums over ranks in another order than in one process


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "size"),
    [("pipeline", 2), ("tensor-parallel", 2), ("tensor-parallel", 4), ("experts", 4)],
)
@pytest.mark.usefixtures("cpu_available")
def test_the_same_as_the_whole_model(ranks: Pool, name: str, size: int, backend: str) -> None:
    reports = ranks.run(size, stages.report, name, NORM_TYPES, backend)
    for rank, report in enumerate(reports):
        whole = {key: grad for key, grad in report.whole.items() if grad is not None}
        for number, outcome in enumerate(report.outcomes):
            label = f"rank {rank}, p={outcome.p}"
            expected = measuring.norm(whole.values(), outcome.p)
            assert outcome.total.item() == pytest.approx(expected, rel=1e-6), label
            same(outcome.total, reports[0].outcomes[number].total, label)
            layers = {layer.name: layer for layer in outcome.layers}
            assert layers.keys() == reports[0].whole.keys(), label
            for key, grad in whole.items():
                layer = layers[key]
                assert layer.numel == grad.numel(), f"{label}, {key}"
                assert (layer.nan, layer.inf) == (0, 0), f"{label}, {key}"
                assert layer.zero == int((grad == 0).sum()), f"{label}, {key}"
                own = measuring.norm([grad], outcome.p)
                assert layer.norm == pytest.approx(own, rel=SPREAD), f"{label}, {key}"
            coef = outcome.limit / expected
            for key, after in outcome.after.items():
                grad = report.whole[key]
                if grad is None or after is None:
                    assert after is grad is None, f"{label}, {key}"
                    continue
                wanted = grad.double()[report.parts.get(key, (slice(None),))] * coef
                apart, most = (after - wanted).abs().max().item(), wanted.abs().max().item()
                assert apart <= SPREAD * most, f"{label}, {key}"


@pytest.mark.parametrize("guilty", [None, 0, 3])
def test_stages_that_are_sharded_by_dtensor(ranks: Pool, guilty: int | None) -> None:
    answers = ranks.run(4, stages.sharded_pipeline, guilty)
    for rank, answer in enumerate(answers):
        assert answer["numel"] == answer["expected numel"]
        assert answer["skipped"] is (guilty is not None)
        if guilty is not None:
            assert answer["nonfinite"] == [f"{guilty // 2}.a"]
            continue
        assert answer["total"] == pytest.approx(answer["expected"], rel=1e-6), f"rank {rank}"
        assert answer["total"] == answers[0]["total"]
        coef = 1.0 / (answer["expected"] + 1e-6)
        for key, after in answer["after"].items():
            wanted = (answer["before"][key].double() * coef).to(torch.float32)
            assert ulps_apart(after, wanted) <= 1, key
