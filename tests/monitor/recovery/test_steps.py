"""Steps, batches, rollbacks and what is kept, with the least state."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fastclip.monitor import Event, Recovery, RollbackPolicy
from tests.monitor.recovery.making import Tally, event, recovery, steps_of, tallied


def test_without_events_every_batch_once(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally)
    assert list(tallied(each, tally, 25)) == [(step, step) for step in range(25)]
    assert tally.batches == list(range(25))
    assert steps_of(each) == [(0, True), (10, True), (20, True), (25, False)]
    assert (each.rollbacks, each.skipped, each.lr_scale) == ([], [], 1.0)
    assert each.checkpoints[1].path == tmp_path / "step-000000010"
    assert each.checkpoints[1].path.is_dir()


def test_steps_end_where_they_are(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally)
    assert len(list(tallied(each, tally, 12))) == 12
    assert list(tallied(each, tally, 12)) == []
    assert list(tallied(each, tally, 5)) == []
    assert list(tallied(each, tally, 14)) == [(12, 12), (13, 13)]
    again = Tally()
    assert list(tallied(recovery(tmp_path, again), again, 15)) == [(14, 14)]
    assert again.batches == list(range(15))


@pytest.mark.parametrize("stopped", [1, 9, 10, 11, 19, 23])
def test_a_process_that_ends_anywhere_is_resumed(tmp_path: Path, stopped: int) -> None:
    first = Tally()
    for step, _ in tallied(recovery(tmp_path, first), first, 30):
        if step == stopped:
            break
    again = Tally()
    resumed = list(tallied(recovery(tmp_path, again), again, 30))
    assert resumed[0] == (stopped // 10 * 10,) * 2
    assert again.batches == list(range(30))


def test_an_error_in_the_body(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally)

    def fail(step: int, batch: int) -> list[Event]:
        if step == 17:
            raise ZeroDivisionError
        return []

    with pytest.raises(ZeroDivisionError):
        list(tallied(each, tally, 30, fail))
    assert list(tallied(each, tally, 30)) == [(step, step) for step in range(10, 30)]
    assert tally.batches == list(range(30))


def test_rollback_to_before_the_onset(tmp_path: Path) -> None:
    """Confirmed are 0 and 10 at step 17; the onset is 12, so 11 to 17 are suspect."""
    tally = Tally()
    each = recovery(tmp_path, tally)

    def alarm(step: int, batch: int) -> list[Event]:
        return [event(17, 12)] if batch == 17 else []

    seen = list(tallied(each, tally, 30, alarm))
    assert seen[:18] == [(step, step) for step in range(18)]
    assert seen[18:20] == [(10, 10), (11, 18)]
    assert tally.batches == [*range(11), *range(18, 37)]
    assert each.rollbacks == [(17, 12, 10, tuple(range(11, 18)))]
    assert each.skipped == list(range(11, 18))
    assert steps_of(each) == [(0, True), (10, True), (20, True), (30, False)]


@pytest.mark.parametrize(
    ("alarm", "onset", "target"),
    [(14, 14, 0), (15, 12, 10), (15, 11, 10), (16, 10, 0), (29, 21, 20), (26, 20, 10), (3, 0, 0)],
)
def test_targets(tmp_path: Path, alarm: int, onset: int, target: int) -> None:
    """The newest confirmed one that has seen no suspect batch; step 0 whatever happens."""
    tally = Tally()
    each = recovery(tmp_path, tally)
    fired: list[int] = []
    for step, batch in each.steps(35):
        tally.batches.append(batch)
        if step == alarm and not fired:
            fired.append(batch)
            assert each.handle([event(alarm, onset)])
    assert [rollback.target for rollback in each.rollbacks] == [target]
    first = max(onset - 1, 0)
    assert each.skipped == list(range(first, alarm + 1))
    assert tally.batches == [b for b in range(50) if not first <= b <= alarm][:35]


def test_before_and_after(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally, RollbackPolicy(confirm=5, before=3, after=2))

    def alarm(step: int, batch: int) -> list[Event]:
        return [event(18)] if batch == 18 else []

    list(tallied(each, tally, 30, alarm))
    assert each.skipped == [15, 16, 17, 18, 19, 20]
    assert each.rollbacks[0].target == 10


def test_several_events_and_lag(tmp_path: Path) -> None:
    """The first onset and the last alarm count; the steps taken meanwhile are not suspect."""
    tally = Tally()
    each = recovery(tmp_path, tally)
    fired: list[Event] = []
    for step, batch in each.steps(30):
        tally.batches.append(batch)
        if step == 19 and not fired:
            fired = [event(17, 14), event(16, 13), event(18, None, "warn")]
            assert each.handle(fired)
            assert each.handle([event(18)])  # no second rollback in one step
    assert each.rollbacks == [(17, 13, 10, (12, 13, 14, 15, 16, 17))]


def test_events_of_the_abandoned_attempt_are_ignored(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally)

    def alarm(step: int, batch: int) -> list[Event]:
        if batch == 17:
            return [event(17)]
        return [event(18), event(19)] if step == 11 else []

    list(tallied(each, tally, 30, alarm))
    assert len(each.rollbacks) == 1


def test_levels_and_predicates(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path / "a", tally)
    for _ in each.steps(3):
        assert not each.handle([event(0, level="warn"), event(0, level="info")])
    each = recovery(tmp_path / "b", tally, RollbackPolicy("warn", confirm=0))
    steps = each.steps(3)
    next(steps)
    assert not each.handle([event(0, level="info")])
    assert each.handle([event(0, level="warn")])
    policy = RollbackPolicy(lambda e: e.metric == "loss" and e.level == "info", confirm=0)
    each = recovery(tmp_path / "c", tally, policy)
    steps = each.steps(3)
    next(steps)
    assert not each.handle([event(0)])
    assert each.handle([event(0, level="info")])


def test_two_rollbacks(tmp_path: Path) -> None:
    """Batch numbers stay absolute: the second skips what its steps had used."""
    tally = Tally()
    each = recovery(tmp_path, tally)

    def alarm(step: int, batch: int) -> list[Event]:
        return [event(step)] if batch in (13, 27) else []

    list(tallied(each, tally, 40, alarm))
    assert each.skipped == [12, 13, 26, 27]
    assert [rollback.step for rollback in each.rollbacks] == [13, 25]
    assert tally.batches == [batch for batch in range(44) if batch not in each.skipped]


def test_budget(tmp_path: Path) -> None:
    """Also of another process, which finds what was decided."""
    tally = Tally()
    policy = RollbackPolicy(confirm=2, max_rollbacks=3)
    bad = {12, 16, 22, 33}

    def alarm(step: int, batch: int) -> list[Event]:
        return [event(step, step)] if batch in bad else []

    list(tallied(recovery(tmp_path, tally, policy, 5), tally, 15, alarm))
    used = len(recovery(tmp_path, tally, policy, 5).rollbacks)
    assert used == 2
    list(tallied(recovery(tmp_path, tally, policy, 5), tally, 22, alarm))
    each = recovery(tmp_path, tally, policy, 5)
    said = "alarm at step 27, onset 27, .* all are used: 3 of at most 3"
    with pytest.raises(RuntimeError, match=said):
        list(tallied(each, tally, 40, alarm))
    with pytest.raises(RuntimeError, match=said):
        list(tallied(recovery(tmp_path, tally, policy, 5), tally, 40, alarm))


def test_the_decision_is_on_disk(tmp_path: Path) -> None:
    """A process that dies after `handle` resumes at the target, and newer checkpoints are gone."""
    tally = Tally()
    each = recovery(tmp_path, tally, RollbackPolicy(confirm=15))
    for step, _ in each.steps(40):
        if step == 29:
            assert each.handle([event(29, 18)])
            break
    again = recovery(tmp_path, tally, RollbackPolicy(confirm=15))
    assert again.rollbacks == each.rollbacks
    assert again.rollbacks[0][:3] == (29, 18, 10)
    steps = again.steps(40)
    assert next(steps) == (10, 10)
    assert [checkpoint.step for checkpoint in again.checkpoints] == [0, 10]
    assert again.lr_scale == 0.5


def test_nothing_is_saved_that_will_be_rolled_back(tmp_path: Path) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally)
    steps = each.steps(10)
    next(steps)
    each.handle([event(0)])
    with pytest.raises(RuntimeError, match="will be rolled back"):
        each.save()


def test_no_target_left(tmp_path: Path) -> None:
    """Step 0 has gone where enough newer ones are confirmed."""
    tally = Tally()
    each = recovery(tmp_path, tally, keep=1)

    def alarm(step: int, batch: int) -> list[Event]:
        return [event(26, 3)] if step == 26 else []

    with pytest.raises(RuntimeError, match=r"step 26, onset 3, .* of a step of at most 2 in"):
        list(tallied(each, tally, 30, alarm))
    assert each.rollbacks == []


@pytest.mark.parametrize("keep", [1, 2])
def test_keep(tmp_path: Path, keep: int) -> None:
    tally = Tally()
    each = recovery(tmp_path, tally, RollbackPolicy(confirm=25), keep=keep)
    for step, _ in tallied(each, tally, 60):
        confirmed = [step for step, good in steps_of(each) if good]
        assert confirmed == list(range(0, step - 24, 10))[-keep:]
        unconfirmed = [step for step, good in steps_of(each) if not good]
        assert unconfirmed == [s for s in range(0, step + 1, 10) if s > step - 25]


def test_confirmed_once_is_confirmed_for_good(tmp_path: Path) -> None:
    tally = Tally()
    for step, _ in tallied(recovery(tmp_path, tally), tally, 40):
        if step == 17:
            break
    assert steps_of(recovery(tmp_path, tally)) == [(0, True), (10, True)]


def test_an_onset_after_the_alarm_counts_as_the_alarm(tmp_path: Path) -> None:
    """Events come from anybody's detectors."""
    each = recovery(tmp_path, Tally(), RollbackPolicy(confirm=0), every=2)
    steps = each.steps(9)
    assert [next(steps)[0] for _ in range(4)] == [0, 1, 2, 3]
    assert each.handle([event(1, 7)])
    assert each.rollbacks == [(1, 1, 0, (0, 1))]


def test_nothing_is_started_anew_beside_checkpoints(tmp_path: Path) -> None:
    tally = Tally()
    with pytest.raises(RuntimeError, match="no intact checkpoint"):
        recovery(tmp_path, tally).restore()
    list(tallied(recovery(tmp_path, tally), tally, 20))
    with pytest.raises(RuntimeError, match=r"call steps\(\) or restore\(\) before save"):
        recovery(tmp_path, tally).save()
    with pytest.raises(RuntimeError, match="of a step of at most -1"):
        recovery(tmp_path, tally).restore(before=-1)
    ledger = tmp_path / "recovery.json"
    content = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(RuntimeError, match=r"recovery.json is missing"):
        next(recovery(tmp_path, tally).steps(30))
    ledger.write_bytes(content[:30])
    with pytest.raises(ValueError, match=r"recovery.json, which has .* cannot be used"):
        recovery(tmp_path, tally)
    for fields, said in (
        ({"version": 9}, "version 9, where 1 is known"),
        ({"pending": "x"}, "cannot be used: invalid literal"),
        ({"confirmed": 1e400}, "cannot be used: cannot convert float infinity"),
    ):
        ledger.write_text(json.dumps(json.loads(content) | fields))
        with pytest.raises(ValueError, match=said):
            recovery(tmp_path, tally)


@pytest.mark.parametrize(
    ("name", "value", "must_be"),
    [
        ("on", "bad", "one of 'info', 'warn', 'critical' or a function"),
        ("on", 3, "one of 'info', 'warn', 'critical' or a function"),
        ("on", ["warn"], "one of 'info', 'warn', 'critical' or a function"),
        ("confirm", -1, "a whole number of at least 0"),
        ("before", "2", "a whole number of at least 0"),
        ("after", True, "a whole number of at least 0"),
        ("lr_steps", None, "a whole number of at least 0"),
        ("max_rollbacks", 1.5, "a whole number of at least 0"),
        ("lr_scale", math.nan, "a finite number of at least 0"),
        ("lr_scale", math.inf, "a finite number of at least 0"),
        ("lr_scale", -0.5, "a finite number of at least 0"),
        ("lr_scale", "a", "a finite number of at least 0"),
        ("lr_scale", None, "a finite number of at least 0"),
        ("lr_scale", 1j, "a finite number of at least 0"),
        ("ranks", (0, 1), "a function or None"),
    ],
    ids=repr,
)
def test_wrong_policies(name: str, value: Any, must_be: str) -> None:
    """A value out of its range is a ValueError, one of another type a TypeError."""
    in_type = isinstance(value, float) if name == "lr_scale" else value in ("bad", -1)
    said = re.escape(f"{name} must be {must_be}, got {value!r}")
    with pytest.raises(ValueError if in_type else TypeError, match=f"^{said}$"):
        RollbackPolicy(**{name: value})


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        recovery(tmp_path, Tally(), every=0)
    with pytest.raises(ValueError, match="keep must be a whole number of at least 1, got 0"):
        recovery(tmp_path, Tally(), keep=0)
    with pytest.raises(ValueError, match="first must be a whole number of at least 0, got -1"):
        Recovery(tmp_path, {"tally": Tally()}, first=-1)
    with pytest.raises(TypeError, match=r"state\['scaler'\] has no state_dict: None"):
        Recovery(tmp_path, {"scaler": None})  # type: ignore[dict-item]


@pytest.mark.parametrize("stop", [2.5, True, "3", None, -1, math.nan], ids=repr)
def test_wrong_stops(tmp_path: Path, stop: Any) -> None:
    each = recovery(tmp_path / "run", Tally())
    with pytest.raises((TypeError, ValueError), match=f"stop must be a whole number .*{stop!r}"):
        next(each.steps(stop))
    assert not (tmp_path / "run").exists()
    assert next(each.steps(sys.maxsize)) == (0, 0)
