"""Watches of models in shards: parameters are measured whole, activations as a rank has them."""

import math

import pytest
from torch import Tensor

from tests.distributed import updates
from tests.distributed.ranks import Pool

CLOSE = 1e-6


def norm(tensors: list[Tensor]) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


@pytest.mark.parametrize(("layout", "size"), [("fsdp", 2), ("tensor", 2), ("fsdp-x-tensor", 4)])
def test_norms_are_of_whole_parameters_and_the_same_on_all_ranks(
    ranks: Pool, layout: str, size: int
) -> None:
    answers = ranks.run(size, updates.update, layout, size)
    for said in answers:
        before = [each.double() for each in said.before.values()]
        after = [each.double() for each in said.after.values()]
        update = [b - a for a, b in zip(before, after, strict=True)]
        names, columns = said.taken["layers"]
        assert names == tuple(said.before)
        assert norm(update) > 0
        assert float(said.taken["param_norm"]) == pytest.approx(norm(after), rel=CLOSE)
        ratio = norm(update) / norm(before)
        assert float(said.taken["update_ratio"]) == pytest.approx(ratio, rel=CLOSE)
        of_each = [norm([tensor]) for tensor in after]
        assert columns["param_norm"].tolist() == pytest.approx(of_each, rel=CLOSE)
        ratios = [norm([u]) / norm([b]) for u, b in zip(update, before, strict=True)]
        assert columns["update_ratio"].tolist() == pytest.approx(ratios, rel=CLOSE)
    first, *_, other = (said.taken for said in answers)
    assert first["update_ratio"].equal(other["update_ratio"])
    assert first["layers"].columns["param_norm"].equal(other["layers"].columns["param_norm"])


def test_activations_are_those_of_the_rank(ranks: Pool) -> None:
    answers = ranks.run(2, updates.activations, 2)
    assert [mine for mine, _ in answers] == [expected for _, expected in answers]
    assert answers[0][0] != answers[1][0]
