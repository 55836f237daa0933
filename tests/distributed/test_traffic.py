"""Collectives: one small table for every set of ranks, and nothing of the gradients' size."""

import pytest

from tests.distributed import measuring, models, traffic
from tests.distributed.ranks import Pool

TABLE = "c10d::_allgather_base_"
SILENT = ("clip_grads_with_norm_", "by_rank")  # need nothing of others


def elements(rows: int, size: int) -> int:
    """Six numbers for each row and two for the header, of every rank."""
    return 6 * (rows + 3) * size


@pytest.mark.parametrize(
    ("layout", "size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp-bf16", 4)]
)
def test_one_table_of_a_mesh(ranks: Pool, layout: str, size: int) -> None:
    for count, answer in ranks.run(size, traffic.of_layout, layout, size):
        for call, sent in answer.items():
            expected = [] if call in SILENT else [(TABLE, elements(count, size))]
            assert sent == expected, call


@pytest.mark.parametrize(("layout", "meshes"), [("fsdp-x-tensor", 2), ("several-meshes", 3)])
def test_at_most_one_table_for_each_set_of_ranks(ranks: Pool, layout: str, meshes: int) -> None:
    for count, answer in ranks.run(4, traffic.of_layout, layout, 4):
        for call, sent in answer.items():
            if call in SILENT:
                assert sent == [], call
                continue
            assert 1 <= len(sent) <= meshes, call
            for operator, most in sent:
                assert operator == TABLE, call
                assert most <= elements(count, 4), call


def test_300_gradients_take_one_table_of_14_kilobytes(ranks: Pool) -> None:
    for answer in ranks.run(2, traffic.of_many, 2, 300):
        for call, sent in answer.items():
            assert sent == ([] if call in SILENT else [(TABLE, elements(300, 2))]), call


def test_partial_gradients_are_reduced_and_no_others(ranks: Pool) -> None:
    for _, answer in ranks.run(2, traffic.of_layout, "tensor", 2):
        for call, sent in answer.items():
            if call in SILENT:
                assert sent == [], call
                continue
            assert [operator for operator, _ in sent].count(TABLE) == 2, call  # one before it
            # the weight and the bias of the norm, which torch reduces once more for its step
            assert len(sent) == (6 if call == "step" else 4), call


def test_one_table_of_each_process_group(ranks: Pool) -> None:
    for answer in ranks.run(4, traffic.of_groups):
        for call, sent in answer.items():
            assert [operator for operator, _ in sent] == [TABLE] * 2, call
            assert sum(most for _, most in sent) < 200, call  # of gradients of 1000


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel_gradients_need_nothing(ranks: Pool, size: int) -> None:
    expected = measuring.norm(models.gradients().values(), 2.0)
    for answer, total in ranks.run(size, traffic.of_ddp, size):
        assert total == pytest.approx(expected, rel=1e-6)
        assert len(answer) > 8
        for call, sent in answer.items():
            assert sent == [], call
