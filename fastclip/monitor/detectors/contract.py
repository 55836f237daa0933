"""What a detector is, and what detectors refuse."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

from fastclip.checks import require
from fastclip.monitor.records import METRICS, Event, StepRecord

State = Any  # plain immutable data; the detector's own business


class Detector(Protocol):
    """From records to events, with no memory but the state it is handed.

    A detector may have a `kind` and a `metric`, both str: the Monitor saves its state under them.
    """

    def init(self) -> State:
        """The state before the first record: plain immutable data, as every later one."""

    def __call__(self, state: State, record: StepRecord) -> tuple[State, list[Event]]:
        """The state after `record`, and what there is to say about it."""


def answer(detector: Detector, state: State, record: StepRecord) -> tuple[State, list[Event]]:
    """What a detector makes of a record. `TypeError` naming one that gives anything else."""
    given: Any = detector(state, record)
    if not isinstance(given, tuple) or len(given) != 2:
        raise _wrong_answer(detector, given)
    after, events = given
    if not events:
        return after, []
    if not isinstance(events, Iterable):
        raise _wrong_answer(detector, given)
    events = list(events)
    if not all(isinstance(event, Event) for event in events):
        raise _wrong_answer(detector, given)
    return after, events


def _wrong_answer(detector: Detector, given: object) -> TypeError:
    name = type(detector).__name__
    return TypeError(f"{name} must return a state and a list of events, returned {given!r:.80}")


def require_metric(metric: object) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r:.80}")


def require_window(window: object, name: str = "window") -> None:
    require(name, window, "a whole number of at least 1", lambda x: x >= 1, whole=True)


def require_positive(name: str, value: object) -> None:
    require(name, value, "a finite number over 0", lambda x: 0 < x < math.inf)


def set_field(detector: object, name: str, value: object) -> None:
    """In __post_init__ of a frozen dataclass."""
    object.__setattr__(detector, name, value)
