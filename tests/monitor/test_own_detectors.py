"""Detectors that users write: what they may return, and what is said when it is something else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fastclip.monitor import Event, Monitor, StepRecord, default_detectors
from fastclip.monitor.monitor import KEPT
from tests.monitor.making import incident_log, of_loss
from tests.monitor.test_observe import Kept


class Own:
    """Counts records, and answers with what `make` makes of the count and the record."""

    def __init__(self, make: Callable[[int, StepRecord], Any]) -> None:
        self.make = make

    def init(self) -> int:
        return 0

    def __call__(self, state: int, record: StepRecord) -> Any:
        return self.make(state + 1, record)


def event(record: StepRecord) -> Event:
    return Event(record.step, "own", "info", "loss", 1.0)


class Answer(NamedTuple):
    state: int
    events: list[Event]


GIVEN: dict[str, Callable[[int, StepRecord], Any]] = {
    "list": lambda count, record: (count, [event(record)]),
    "tuple": lambda count, record: (count, (event(record),)),
    "generator": lambda count, record: (count, (event(record) for _ in range(1))),
    "named-tuple": lambda count, record: Answer(count, [event(record)]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_events_may_be_any_iterable(name: str) -> None:
    monitor = Monitor([Own(GIVEN[name])])
    events = monitor.replay(of_loss([3.0, 2.0]))
    assert [(e.step, e.kind, e.onset, e.onset_metric) for e in events] == [
        *((0, "own", 0, "loss"), (1, "own", 1, "loss"))
    ]
    assert monitor.state_dict()["detectors"] == {"Own//0": 2}  # without a kind: its class


def no_events(count: int, record: StepRecord) -> Any:
    return count, None


def test_no_events_may_be_none() -> None:
    assert Monitor([Own(no_events)]).replay(of_loss([3.0, 2.0])) == []


WRONG: dict[str, tuple[Callable[[int, StepRecord], Any], str]] = {
    "nothing": (lambda count, record: None, "None"),
    "events-alone": (lambda count, record: [event(record)], r"\[Event"),
    "three": (lambda count, record: (count, [], 1), r"\(3, \[\], 1\)"),
    "one-event": (lambda count, record: (count, event(record)), r"\(3, Event"),
    "texts": (lambda count, record: (count, ["spike"]), r"\(3, \['spike'\]\)"),
    "generator": (lambda count, record: iter((count, [])), "<tuple_iterator"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_names_its_detector_and_changes_nothing(name: str) -> None:
    make, returned = WRONG[name]

    def late(count: int, record: StepRecord) -> Any:
        return make(count, record) if record.step == 2 else (count, [])

    sink = Kept()
    monitor = Monitor([*default_detectors(), Own(late)], [sink])
    for step in range(2):
        monitor.observe(step=step, loss=1.0)
    state = monitor.state_dict()
    text = f"Own must return a state and a list of events, returned {returned}"
    with pytest.raises(TypeError, match=text):
        monitor.observe(step=2, loss=1.0)
    assert (monitor.state_dict(), len(sink.records)) == (state, 2)
    monitor.observe(step=3, loss=1.0)
    assert monitor.state_dict()["detectors"]["Own//0"] == 3


class Loud:
    """One more event whenever the loss is over 2; the state is the steps of the last three."""

    kind, metric = "loud", "loss"

    def init(self) -> tuple[int, ...]:
        return ()

    def __call__(
        self, state: tuple[int, ...], record: StepRecord
    ) -> tuple[tuple[int, ...], list[Event]]:
        if record.loss is None or not record.loss > 2.0:
            return state, []
        found = Event(record.step, self.kind, "critical", self.metric, record.loss, 2.0)
        return (*state, record.step)[-3:], [found]


def test_goes_back_and_resumes_like_one_of_the_package() -> None:
    records = incident_log()
    uncut = Monitor([Loud()])
    events = uncut.replay(records)
    assert len(events) > 500
    first, second = Monitor([Loud()]), Monitor([Loud()])
    found = first.replay(records[:777])
    second.load_state_dict(first.state_dict())
    found += second.replay(records[777:])
    assert repr(found) == repr(events)
    assert second.state_dict() == uncut.state_dict()
    back = records[2000 - KEPT // 2 :]
    assert repr(second.replay(back)) == repr([e for e in events if e.step >= back[0].step])
    assert second.state_dict()["detectors"] == uncut.state_dict()["detectors"]
