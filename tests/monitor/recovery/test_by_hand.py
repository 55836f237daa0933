"""Saving and going back by hand, and loops that are left and taken up again."""

from pathlib import Path

import pytest

from fastclip.monitor import RollbackPolicy
from tests.monitor.recovery.making import Tally, event, recovery, steps_of, tallied


def test_saving_by_hand(tmp_path: Path) -> None:
    """Before `handle` the update of this step is still to come, after it is there."""
    tally = Tally()
    each = recovery(tmp_path, tally)
    for step, batch in each.steps(20):
        if step == 3:
            assert each.save().step == 3
        tally.batches.append(batch)
        each.handle([])
        if step == 6:
            assert each.save() == (7, tmp_path / "step-000000007", False)
            break
    assert [step for step, _ in steps_of(each)] == [0, 3, 7]
    again = Tally()
    assert recovery(tmp_path, again).restore(6) == 3
    assert again.batches == [0, 1, 2]
    assert recovery(tmp_path, again).restore() == 7
    assert again.batches == list(range(7))


def test_going_on_from_where_one_went_back_to(tmp_path: Path) -> None:
    """What is newer stays until the run has got to its next checkpoint."""
    tally = Tally()
    list(tallied(recovery(tmp_path, tally), tally, 40))
    each = recovery(tmp_path, tally)
    assert each.restore(before=25) == 20
    steps = tallied(each, tally, 40)
    assert next(steps) == (20, 20)
    assert [step for step, _ in steps_of(each)] == [10, 20, 30, 40]
    seen = [next(steps) for _ in range(10)]
    assert seen[-1] == (30, 30)
    assert steps_of(each) == [(10, True), (20, True), (30, False)]


def test_what_is_newer_is_nothing_to_this_attempt(tmp_path: Path) -> None:
    """It is no target, nothing to resume from, and gone once this attempt has a checkpoint."""
    tally = Tally()
    list(tallied(recovery(tmp_path, tally), tally, 40))
    each = recovery(tmp_path, tally, RollbackPolicy(confirm=0), every=100)
    assert each.restore(before=25) == 20
    for step, _ in each.steps(50):
        if step == 38:
            assert each.handle([event(38, 37)])
            break
    assert each.rollbacks[0].target == 20
    steps = each.steps(50)
    assert [next(steps)[0] for _ in range(4)] == [20, 21, 22, 23]
    steps.close()  # type: ignore[attr-defined]
    each = recovery(tmp_path / "b", tally)
    list(tallied(each, tally, 40))
    assert each.restore(before=25) == 20
    steps = each.steps(50)
    assert [next(steps)[0] for _ in range(3)] == [20, 21, 22]
    steps.close()  # type: ignore[attr-defined]
    steps = each.steps(50)
    assert next(steps)[0] == 20
    next(steps)
    each.save()
    assert steps_of(each) == [(10, True), (20, True), (21, False)]


@pytest.mark.parametrize("decided", [False, True], ids=["by hand", "after handle"])
def test_restoring_in_the_body(tmp_path: Path, decided: bool) -> None:
    """The loop goes on from there, whether or not it would have gone back by itself."""
    tally = Tally()
    each = recovery(tmp_path, tally)
    seen = []
    for step, batch in each.steps(25):
        seen.append(step)
        tally.batches.append(batch)
        if len(seen) == 18:
            assert each.handle([event(17, 16)] if decided else []) is decided
            assert each.restore(None if decided else 14) == 10
    assert seen == [*range(18), *range(10, 25)]
    skipped = [15, 16, 17] if decided else []
    assert tally.batches == [batch for batch in range(25 + len(skipped)) if batch not in skipped]


def test_one_loop_at_a_time(tmp_path: Path) -> None:
    """The later one: the one before it may be alive in a traceback, and end at any time."""
    tally = Tally()
    each = recovery(tmp_path, tally, every=5)
    before, after = each.steps(20), each.steps(20)
    assert [next(before)[0] for _ in range(7)] == list(range(7))
    assert next(after)[0] == 5
    with pytest.raises(
        RuntimeError, match=r"steps\(\) was called again, and this loop cannot go on"
    ):
        next(before)
    assert next(after)[0] == 6


def test_a_process_that_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    each = recovery(Path("run"), Tally(), every=2)
    for step, _ in each.steps(5):
        if step == 3:
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["elsewhere"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [step for step, _ in steps_of(each)] == [0, 2, 4, 5]
