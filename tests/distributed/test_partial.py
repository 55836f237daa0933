"""Gradients that are sums still to be made."""

import pytest

from tests.distributed import partial
from tests.distributed.ranks import Pool


@pytest.mark.parametrize(("kind", "norm"), [("sum", 150112.0), ("avg", 75056.0)])
def test_sums_are_wider_than_their_parts(ranks: Pool, kind: str, norm: float) -> None:
    for total, coef, counts in ranks.run(2, partial.overflowing, kind):
        assert total == norm
        assert coef == pytest.approx(1 / norm, rel=1e-6)
        assert counts == [0, 0]


def test_the_norm_of_a_sum_of_bfloat16_parts(ranks: Pool) -> None:
    for total, expected in ranks.run(2, partial.in_bfloat16):
        assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("further", [False, True], ids=["one", "two"])
def test_a_summand_that_some_ranks_lack_is_an_error_on_all(ranks: Pool, further: bool) -> None:
    for texts, afterwards in ranks.run(4, partial.summand_on_some, [0, 3], further):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith(
                "gradient 'w' is a partial DTensor, to be summed over ranks 0-3, but ranks 1, 2 "
                "have no summand"
            )
        assert afterwards == 8.0


@pytest.mark.parametrize("length", [4, 5, 7])
@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_a_mesh_whose_ranks_are_not_in_order(ranks: Pool, kind: str, length: int) -> None:
    for total, expected in ranks.run(4, partial.permuted, kind, length):
        assert total == pytest.approx(expected, rel=1e-6)


def test_equal_meshes_of_other_groups(ranks: Pool) -> None:
    for norms in ranks.run(2, partial.of_new_groups):
        assert norms == pytest.approx([4, 8**0.5, 8, 32**0.5, 12, 72**0.5], rel=1e-6)
