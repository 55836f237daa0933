"""The harness itself: answers, tracebacks, ranks that hang or die."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.ranks import Pool, RanksFailed


def summed(value: float) -> tuple[int, Tensor]:
    mine = torch.tensor(value + dist.get_rank())
    dist.all_reduce(mine)
    return dist.get_world_size(), mine


def raising(guilty: int) -> None:
    if dist.get_rank() == guilty:
        raise ValueError("a fault of mine")


def hanging(guilty: int) -> None:
    while dist.get_rank() == guilty:
        time.sleep(0.1)


def dying(guilty: int) -> int:
    if dist.get_rank() == guilty:
        os._exit(3)
    return dist.get_rank()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_with_what_the_job_returned(ranks: Pool, size: int) -> None:
    for value in (0.0, 0.5):
        total = value * size + sum(range(size))
        answers = ranks.run(size, summed, value)
        assert [(n, answer.item()) for n, answer in answers] == [(size, total)] * size


def test_a_fault_comes_with_rank_and_traceback_and_the_pool_goes_on(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 raised.*in raising.*a fault of mine") as e:
        ranks.run(2, raising, 1)
    assert "rank 0" not in str(e.value)
    assert ranks.run(2, dying, 5) == [0, 1]


def test_a_rank_that_hangs_is_named_with_its_stack_and_replaced(mortal_ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 gave no answer.*in hanging") as e:
        mortal_ranks.run(2, hanging, 1, seconds=1)
    assert "rank 0" not in str(e.value)
    assert mortal_ranks.run(2, dying, 5) == [0, 1]


def test_a_rank_that_dies_is_named_unless_it_was_to_die(mortal_ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died with exit status 3"):
        mortal_ranks.run(2, dying, 1)
    assert mortal_ranks.run(2, dying, 1, dying=[1]) == [0, None]
    with pytest.raises(RanksFailed, match="rank 0 was to die and did not"):
        mortal_ranks.run(2, dying, 5, dying=[0])
