"""Attempts, states and events are the same with rows on their way."""

import copy
import gc
import math
import pickle
from collections.abc import Callable

import pytest
import torch

import fastclip
from fastclip.monitor import Event, Monitor, NonFinite, StepRecord
from tests.making import floats, parameters
from tests.monitor.making import incident_log
from tests.monitor.test_monitor import fields
from tests.monitor.test_observe import Kept
from tests.monitor.test_telemetry import lagging


def test_attempts_are_counted_in_the_order_of_the_rows() -> None:
    sink = Kept()
    monitor = lagging(3, [sink], [])
    for step in (0, 1, 1, 5, 3, 4):
        monitor.observe(step=torch.tensor(step))  # type: ignore[arg-type]
    monitor.observe(step=5, attempt=9)
    monitor.observe(step=5)
    assert monitor.attempt == 2  # of step 3, the newest record
    monitor.flush()
    assert [record.attempt for record in sink.records] == [0, 0, 1, 1, 2, 2, 9, 10]


def test_a_state_is_of_all_rows_and_loses_no_event() -> None:
    monitor = lagging(2, (), [NonFinite()])
    for step in range(3):
        monitor.observe(step=step, loss=math.nan)
    assert monitor.state_dict()["step"] == 2
    assert [event.step for event in monitor.observe(step=3, loss=1.0)] == [1, 2]
    monitor.observe(step=4, loss=math.nan)
    monitor.load_state_dict(Monitor([NonFinite()]).state_dict())
    assert [event.step for event in monitor.flush()] == [4]


def test_a_rollback_with_rows_on_their_way() -> None:
    """They belong to the attempt before it."""
    sink = Kept()
    monitor = lagging(2, [sink], [])
    monitor.observe(step=0)
    state = monitor.state_dict()
    for step in (1, 2, 3):
        monitor.observe(step=step)
    monitor.load_state_dict(state)
    for step in (1, 2, 3):
        monitor.observe(step=step)
    monitor.flush()
    pairs = [(record.attempt, record.step) for record in sink.records]
    assert pairs == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def test_a_state_is_loaded_though_a_sink_fails() -> None:
    class Full:
        def write(self, record: StepRecord, events: list[Event]) -> None:
            raise OSError("no space")

    saved = Monitor([NonFinite()])
    saved.observe(step=7)
    monitor = lagging(2, [Full()], [NonFinite()])
    monitor.observe(step=3)
    with pytest.raises(OSError, match="no space"):
        monitor.load_state_dict(saved.state_dict())
    assert monitor.state_dict() == saved.state_dict()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_rows_on_their_way_stay_with_the_original(copied: Callable[[Monitor], Monitor]) -> None:
    stats = fastclip.grad_stats(parameters(floats(3.0)))
    sink = Kept()
    monitor = lagging(2, [sink], [NonFinite()])
    for step in range(4):
        monitor.observe(step=step, loss=math.nan if step == 2 else 1.0, stats=stats)
    copy_ = copied(monitor)
    assert (len(monitor.telemetry), len(copy_.telemetry)) == (2, 0)
    assert (copy_.telemetry.lag, copy_.telemetry.layers_every) == (2, 100)
    copy_.observe(step=9)
    [kept] = copy_.sinks
    assert isinstance(kept, Kept)
    del copy_
    gc.collect()
    assert [record.step for record in kept.records] == [0, 1, 9]
    assert [event.step for event in monitor.flush()] == [2]
    assert [record.step for record in sink.records] == [0, 1, 2, 3]


def joined(found: list[list[Event]]) -> str:
    """As text, in which NaN equals NaN."""
    return repr([event for events in found for event in events])


def test_a_lag_changes_no_event() -> None:
    records = incident_log()
    at_once, later = Monitor(), lagging(2)
    found = [at_once.observe(**fields(record)) for record in records]
    delayed = [later.observe(**fields(record)) for record in records]
    assert repr([[], [], *found[:-2]]) == repr(delayed)
    assert repr(later.flush()) == joined(found[-2:])
    assert later.state_dict() == at_once.state_dict()


def test_resumes_at_every_cut_point_with_rows_on_their_way() -> None:
    """At each of 2,000 cuts a Monitor with two rows queued gives the state of all rows so far, with
    their events still to come; one made of that state says the same of the next rows, and is then
    in the same state. So it says the same of all that follow.
    """
    records = incident_log()
    uncut = Monitor()
    found, states = [], [uncut.state_dict()]
    for record in records:
        found.append(uncut.observe(**fields(record)))
        states.append(uncut.state_dict())
    for cut in range(1, len(records)):
        start = max(cut - 2, 0)
        before, after = lagging(2), lagging(2)
        before.load_state_dict(states[start])
        for record in records[start:cut]:
            assert before.observe(**fields(record)) == []
        state = pickle.loads(pickle.dumps(before.state_dict()))
        assert state == states[cut]
        assert repr(before.flush()) == joined(found[start:cut])
        after.load_state_dict(state)
        following = records[cut : cut + 3]
        events = [after.observe(**fields(record)) for record in following]
        assert joined([*events, after.flush()]) == joined(found[cut : cut + 3])
        assert after.state_dict() == states[min(cut + 3, len(records))]
