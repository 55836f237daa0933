"""The fault laboratory keeps its promises: one seed of each fault, and of the runs without any."""

import pytest

from examples.fault_lab import CLEAN, FAULTS, broken, run_all, tables
from examples.fault_run import Outcome, ranges

pytestmark = pytest.mark.slow  # 40 seconds of a core
SEED = 3


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found = run_all([fault.name for fault in FAULTS], [SEED])
    return {outcome.fault: outcome for outcome, _ in found}


@pytest.mark.parametrize("name", [fault.name for fault in (*CLEAN, *FAULTS)])
def test_promises_are_kept(outcomes: dict[str, Outcome], name: str) -> None:
    assert broken(outcomes[name]) == []


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("fp16-overflow", "blocks.0.mlp.0 in fp16"),
        ("nan-gradient", "blocks.0.mlp.0.weight"),
        ("poisoned-rank", "rank 1"),
    ],
)
def test_culprit_is_named(outcomes: dict[str, Outcome], fault: str, named: str) -> None:
    assert outcomes[fault].named == named


def test_only_the_poisoned_rank_skips_a_batch(outcomes: dict[str, Outcome]) -> None:
    at = outcomes["poisoned-rank"].injected
    assert outcomes["poisoned-rank"].skipped == f"rank 1: {at - 1}-{at}"


def test_a_skipped_step_needs_no_rollback(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["nan-gradient"]
    assert (outcome.rollbacks, outcome.skipped_steps) == (0, 1)


def test_dying_loss_scale_is_diagnosed(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["dying-loss-scale"].boundary == "loss_scale"


def test_both_tables_have_a_line_for_each(outcomes: dict[str, Outcome]) -> None:
    for table in tables(list(outcomes.values())):
        lines = table.splitlines()
        assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(outcomes)
        assert len({line.count("|") for line in lines}) == 1


def test_a_late_onset_a_second_rollback_and_a_worse_loss_break_promises() -> None:
    bad = Outcome(
        *("corrupted-batch", 0, 150),
        detected=150,
        onset=151,
        rollbacks=2,
        final=2.1,
        clean=2.0,
    )
    assert broken(bad) == [
        "onset 1 steps after the injection",
        "2 rollbacks",
        "final loss +5.0%",
    ]


def test_an_alarm_without_a_fault_breaks_a_promise() -> None:
    outcome = Outcome("none", 0, 150, detected=7, detector="spike of loss")
    assert broken(outcome) == ["alarm of spike of loss"]


def test_ranges() -> None:
    assert ranges([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
