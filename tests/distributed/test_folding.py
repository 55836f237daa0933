"""Fused optimizers apply the coefficient to DTensors, as far as torch has them for DTensors."""

import pytest
import torch

from tests.distributed import folding
from tests.distributed.ranks import Pool
from tests.training import near


@pytest.mark.parametrize("size", [2, 4])
def test_fused_adamw_is_handed_the_coefficient(ranks: Pool, size: int) -> None:
    """Gradients are as they were when it begins; a step that is skipped is skipped by it."""
    for answer in ranks.run(size, folding.adamw, size):
        assert answer.written == [False, False]
        assert answer.coef[0] < 0.5
        assert answer.coef[1] == 1.0
        assert answer.handed == pytest.approx(answer.coef, rel=1e-6)
        assert answer.skipped == [False, True]
        near(answer.values[0], answer.expected[0], 1e-6, "the first step")
        for name, value in answer.values[1].items():
            assert value.equal(answer.values[0][name]), name


@pytest.mark.parametrize("with_clipper", [True, False], ids=["clipper", "torch"])
def test_fused_sgd_takes_no_dtensors_with_or_without_a_clipper(
    ranks: Pool, with_clipper: bool
) -> None:
    """When this fails torch has learned it: have the tests above take fused SGD as well."""
    if torch.__version__ < "2.13":
        pytest.skip("seen with torch 2.13")
    for message in ranks.run(2, folding.sgd, 2, with_clipper):
        assert "_fused_sgd_.default does not have a sharding strategy" in message
