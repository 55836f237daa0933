"""What is wrong on one rank is an error on all; nobody is left waiting."""

from pathlib import Path

import pytest

from tests.distributed import troubles
from tests.distributed.ranks import Pool

KINDS = {
    "integers": "TypeError",
    "overlapping": "RuntimeError",
    "overlapping-shard": "RuntimeError",
}


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_gradient_on_one_rank_is_an_error_on_all(
    ranks: Pool, kind: str, guilty: int
) -> None:
    answers = ranks.run(4, troubles.odd_on_one, kind, guilty)
    for rank, answer in enumerate(answers):
        *calls, last = answer
        assert last == "afterwards"
        assert answer[last] == answers[0][last]
        for call in calls:
            error, text, changed = answer[call]
            label = f"{call} on rank {rank}: {error}: {text}"
            assert not changed, label
            if rank == guilty:
                assert error == KINDS[kind], label
                assert "'odd'" in text, label
            else:
                assert error == "FailedElsewhere", label
                assert f"rank {guilty}" in text, label


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize("names", [None, ["b"], ["a", "c"]], ids=["all", "b", "a-and-c"])
def test_a_rank_without_gradients_takes_part(
    ranks: Pool, guilty: int, names: list[str] | None
) -> None:
    answers = ranks.run(4, troubles.without_gradients, guilty, names)
    owns = [answer["expected"][1] for answer in answers]
    for rank, answer in enumerate(answers):
        expected, _ = answer.pop("expected")
        assert len(answer) == len(troubles.CALLS) - 1
        for call, (total, rows, norms) in answer.items():
            label = f"{call} on rank {rank}"
            assert total == pytest.approx(expected, rel=1e-6), label
            assert total == answers[0][call][0], label
            if rows is not None:
                assert rows == ("a", "b", "c"), label
                assert norms == pytest.approx(owns, rel=1e-6), label


def test_no_gradient_anywhere_is_a_norm_of_0(ranks: Pool) -> None:
    for answer in ranks.run(2, troubles.none_anywhere):
        assert set(answer.values()) == {0.0}


@pytest.mark.parametrize("guilty", [0, 1])
def test_other_plain_tensors_on_one_rank_are_an_error_on_all(ranks: Pool, guilty: int) -> None:
    for error, text in ranks.run(2, troubles.other_plain_tensors, guilty):
        assert error == "RuntimeError"
        assert "rank" in text


def test_partial_gradients_that_no_coefficient_passes_through(ranks: Pool) -> None:
    for maximum, clamped in ranks.run(2, troubles.not_linear):
        assert "'odd'" in maximum
        assert "'odd'" in clamped


@pytest.mark.parametrize("grouped", [False, True], ids=["dtensor", "process-group"])
@pytest.mark.parametrize("how", ["exit", "kill", "silent"])
def test_when_a_rank_is_lost_the_others_fail_within_the_time_out(
    mortal_ranks: Pool, how: str, grouped: bool, tmp_path: Path
) -> None:
    arguments = (how, 2, 3, grouped, tmp_path)
    answers = mortal_ranks.run(4, troubles.interrupted, *arguments, timeout=4.0, dying=[2])
    for rank, answer in enumerate(answers):
        if rank == 2:
            continue
        steps, error, was_there = answer
        assert steps == 3
        assert "combining the gradient statistics of ranks 0-3 failed" in error
        assert was_there  # by the time-out, and not by its end
