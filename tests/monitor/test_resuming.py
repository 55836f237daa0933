"""Stopped after any record and gone on with from the saved state: the same events as uncut."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fastclip.monitor import Event, Monitor, StepRecord
from fastclip.monitor.records import NAMES
from tests.monitor.making import incident_log

KINDS = {
    *("spike", "robust_spike", "sustained", "drift", "nonfinite"),
    *("loss_scale_drop", "clip_rate"),
}
# The step of each rollback, and the one gone back to: near, far, and one upon another.
ROLLBACKS = {160: 140, 505: 503, 1250: 900, 1251: 1245}


def with_rollbacks() -> list[StepRecord]:
    """2,000 steps with every kind of event, of which some are gone back to."""
    records, made, left = incident_log(), [], dict(ROLLBACKS)
    step = 0
    while step < len(records):
        if step in left:
            step = left.pop(step)
        made.append(replace(records[step], attempt=len(ROLLBACKS) - len(left)))
        step += 1
    return made


def observed(monitor: Monitor, record: StepRecord) -> list[Event]:
    """As a training loop does it, which knows of no attempts."""
    return monitor.observe(**{n: getattr(record, n) for n in NAMES if n != "attempt"})


def text_of(state: dict[str, Any]) -> str:
    return json.dumps(state, allow_nan=False)


def test_at_every_cut_point_of_a_log_with_rollbacks() -> None:
    """A new monitor per record, which is told the state of the checkpoint: that after the record
    before, or where the step goes back, that of the step gone back to. It says the same of the
    record and is then in the same state, so it says the same of all that follow.
    """
    uncut, kinds = Monitor(), set()
    state = text_of(uncut.state_dict())
    before: dict[int, str] = {}  # the states before each step
    for record in with_rollbacks():
        if record.attempt > uncut.attempt:
            state = before[record.step]
        before[record.step] = state
        resumed = Monitor()
        resumed.load_state_dict({**json.loads(state), "attempt": record.attempt})
        events = observed(uncut, record)
        kinds |= {event.kind for event in events}
        assert repr(observed(resumed, record)) == repr(events)
        state = text_of(uncut.state_dict())
        assert text_of(resumed.state_dict()) == state
    assert kinds == KINDS
    assert uncut.attempt == len(ROLLBACKS)
    again = Monitor()
    again.replay(with_rollbacks())
    assert again.state_dict() == uncut.state_dict()


@pytest.mark.parametrize("cut", [139, 200, 900, 1700, 2300])
def test_a_state_out_of_json_serves_to_the_end(cut: int) -> None:
    """As long as the steps do not go back to before the cut, without the state of then."""
    records, first, second = with_rollbacks(), Monitor(), Monitor()
    events = first.replay(records[:cut])
    second.load_state_dict(json.loads(text_of(first.state_dict())))
    events += second.replay(records[cut:])
    wanted = Monitor()
    assert repr(events) == repr(wanted.replay(records))


def test_a_state_saved_between_a_rollback_and_the_next_record() -> None:
    """It has the newest step, from which attempts are counted, and detectors of an earlier one."""
    records, run = incident_log()[:40], Monitor()
    states = []
    for record in records:
        states.append(run.state_dict())
        observed(run, record)
    run.load_state_dict(states[20])
    saved = run.state_dict()
    assert saved == {**states[20], "step": 39}
    for newer in (25, 35):  # than the state gone back to
        resumed = Monitor()
        resumed.load_state_dict(states[newer])
        observed(resumed, records[newer])
        resumed.load_state_dict(saved)
        observed(resumed, records[20])
        assert resumed.state_dict() == {**states[21], "attempt": 1}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "step": ({"step": "5"}, TypeError, "step of a state is a whole number, got '5'"),
    "attempt": ({"attempt": None}, TypeError, "attempt of a state is a whole number, got None"),
    "judged": ({"judged": 4.5}, TypeError, r"judged of a state is a whole number, got 4\.5"),
    "detectors": ({"detectors": []}, TypeError, r"the detectors of a state are a dict, got \[\]"),
    "bands": ({"bands": None}, ValueError, "a state of the bands has two parts, got None"),
    "fewer-bands": ({"bands": ([], None)}, ValueError, r"one for each of loss, .*got \[\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_refused_before_anything_is_changed(name: str) -> None:
    changes, error, text = WRONG[name]
    monitor = Monitor()
    monitor.replay(incident_log()[:5])
    state = monitor.state_dict()
    with pytest.raises(error, match=text):
        monitor.load_state_dict({**state, **changes})
    assert monitor.state_dict() == state
    with pytest.raises(TypeError, match="a state of a Monitor is a dict, got None"):
        monitor.load_state_dict(None)  # type: ignore[arg-type]
