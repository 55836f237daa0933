"""A Trainer's callback on two ranks under DDP."""

from pathlib import Path

import pytest

from tests.distributed.ranks import Pool
from tests.distributed.trainers import trained


def test_losses_and_decisions_are_those_of_all_ranks(mortal_ranks: Pool, tmp_path: Path) -> None:
    plain = mortal_ranks.run(2, trained, tmp_path, False, seconds=120)
    clipped = mortal_ranks.run(2, trained, tmp_path, True, seconds=120)
    losses = [entry["loss"] for entry in plain[0]["log"] if "loss" in entry]
    assert len(losses) == 10
    for rank in clipped:
        logged = [entry["loss"] for entry in rank["log"] if "loss" in entry]
        assert logged == pytest.approx(losses, abs=1e-5)
        assert [r.loss for r in rank["records"]] == pytest.approx(losses, abs=1e-5)
    assert clipped[0]["records"] == clipped[1]["records"]


def test_all_ranks_go_back_where_one_has_met_a_nan(mortal_ranks: Pool, tmp_path: Path) -> None:
    ranks = mortal_ranks.run(2, trained, tmp_path, True, rolls=True, seconds=120)
    for rank in ranks:
        assert [e["updates_lost"] for e in rank["log"] if "updates_lost" in e] == [4]
        assert [r.step for r in rank["records"]] == [*range(8), 4, 5]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    assert ranks[0]["weight"][0][0] == pytest.approx(ranks[0]["weight"][0][0])  # not NaN


def test_all_ranks_stop_where_the_monitor_of_one_says_so(
    mortal_ranks: Pool, tmp_path: Path
) -> None:
    ranks = mortal_ranks.run(2, trained, tmp_path, True, alarming=1, seconds=120)
    assert [len(rank["records"]) for rank in ranks] == [4, 4]
    why = [entry["stopped_by"] for rank in ranks for entry in rank["log"] if "stopped_by" in entry]
    assert why == ["a critical event on another rank", "step 3: critical: alarm, grad_norm"]
