"""A loop whose data only goes on, and a run that goes on from elsewhere."""

from collections.abc import Collection
from pathlib import Path

import pytest

from fastclip.monitor import Event, Recovery, Rollback, RollbackPolicy
from tests.monitor.recovery.making import Tally, event, steps_of, tallied

POLICY = RollbackPolicy(confirm=5, lr_steps=8)


def made(folder: Path, tally: Tally, first: int = 0) -> Recovery:
    return Recovery(folder, {"tally": tally}, POLICY, every=10, rewinds=False, first=first)


def test_no_batch_since_the_target_is_used_again(tmp_path: Path) -> None:
    tally = Tally()
    each = made(tmp_path, tally)

    def events(step: int, batch: int) -> Collection[Event]:
        return [event(17, onset=16)] if batch == 18 else ()  # as one that comes a step late

    found = list(tallied(each, tally, 30, events))
    steps, batches = zip(*found, strict=True)
    assert batches == tuple(range(39))  # in order, and each once
    assert steps == (*range(19), *range(10, 30))
    assert each.rollbacks == [Rollback(17, 16, 10, tuple(range(10, 19)))]
    assert tally.batches == [*range(10), *range(19, 39)]


def test_a_rollback_carried_out_in_the_body(tmp_path: Path) -> None:
    tally, found = Tally(), []
    each = made(tmp_path, tally)
    for step, batch in each.steps(20):
        tally.batches.append(batch)
        found.append((step, batch))
        if each.handle([event(step)] if batch == 17 else ()):
            assert each.restore() == 10
            assert tally.batches == list(range(10))
    assert found[16:20] == [(16, 16), (17, 17), (10, 18), (11, 19)]


@pytest.mark.parametrize("alarm", [506, 512, 519])
def test_a_run_that_begins_elsewhere(tmp_path: Path, alarm: int) -> None:
    tally = Tally()
    each = made(tmp_path, tally, first=503)

    def events(step: int, batch: int) -> Collection[Event]:
        return [event(alarm)] if batch == alarm else ()

    found = list(tallied(each, tally, 530, events))
    target = 513 if alarm == 519 else 503
    assert found[0] == (503, 503)
    assert found[alarm - 502] == (target, alarm + 1)
    assert each.rollbacks[0].target == target
    assert {step for step, _ in steps_of(each)} == {503, 513, 523, 530}
