"""The Monitor: observes records, as they come or from a log, and says what its detectors find."""

import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from fastclip.monitor.bands import Bands
from fastclip.monitor.detectors import Detector, default_detectors
from fastclip.monitor.detectors.contract import answer
from fastclip.monitor.log import JSONL
from fastclip.monitor.observed import from_stats, on_host
from fastclip.monitor.records import NAMES, Event, StepRecord, make_record

if TYPE_CHECKING:
    from fastclip.stats import GradStats

KEPT = 2000  # states to go back to

States = tuple[Any, ...]  # of the bands, then of each detector

_NOTHING = (0, -math.inf)  # attempt and step before any record


class Sink(Protocol):
    """Where records and events go. One that continues what is there already also has
    ``last() -> StepRecord | None``: the newest record it holds.
    """

    def write(self, record: StepRecord, events: list[Event]) -> None: ...


class Monitor:
    """Watches a run.

    >>> monitor = Monitor(sinks=[JSONL("run.jsonl")])
    >>> events = monitor.observe(step=step, loss=loss, stats=stats)

    `detectors`: None means `default_detectors()`, an empty list none. Events of one record come in
    the order of the detectors, each with the onset that the normal bands (`Bands`) tell.

    Where the step is not larger than the one before it, a new attempt begins: `attempt` grows by
    one, and detectors and bands take up the state they had before that step. The states of the
    last 2,000 records are kept for that; further back they start empty.
    """

    def __init__(
        self, detectors: Iterable[Detector] | None = None, sinks: Iterable[Sink] = ()
    ) -> None:
        self.detectors = tuple(default_detectors() if detectors is None else detectors)
        self.sinks = tuple(sinks)
        _require_parts(self.detectors, self.sinks)
        self._attempt, self._step = _NOTHING  # of the newest record
        self._logged = _newest(self.sinks)  # the same in the logs that are continued
        self._bands = Bands()
        self._keys = _keys(self.detectors)
        # What the states were after which step. The first entry is from before any.
        self._history: deque[tuple[float, States]] = deque(maxlen=KEPT + 1)
        self._history.append((-math.inf, self._empty()))

    @property
    def attempt(self) -> int:
        """Of the newest record; before there is one, of the log that a sink continues."""
        return max(self._attempt, self._logged[0])

    def observe(self, *, step: int, stats: "GradStats | None" = None, **fields: Any) -> list[Event]:
        """Take in what was measured in a step; its events.

        `fields` are those of `StepRecord`. `stats` fills grad_norm, clip_coef, clipped,
        nonfinite_count and skipped; a keyword wins over it. Numbers, NumPy scalars and CPU tensors
        of one element are read at once.
        """
        unknown = fields.keys() - NAMES
        if unknown:
            raise TypeError(f"a record has no {min(unknown)!r}; its fields are {', '.join(NAMES)}")
        given = {"step": step, **(from_stats(stats) if stats is not None else {}), **fields}
        # What is on a device, which on_host refuses, has to wait for its copy between these lines.
        record = make_record({name: on_host(name, value) for name, value in given.items()})
        if fields.get("attempt") is None:
            newest = max(self._step, self._logged[1])
            record = _in_attempt(record, self.attempt + (record.step <= newest))
        events = self._judge(record)
        self._logged = _NOTHING
        for sink in self.sinks:
            sink.write(record, events)
        return events

    def flush(self) -> list[Event]:
        """Wait for what is still being read back from a device, and observe it; its events."""
        return []

    def replay(self, log: str | os.PathLike[str] | Iterable[StepRecord]) -> list[Event]:
        """Observe the records of a log, and write them to no sink; their events."""
        events: list[Event] = []
        for record in JSONL(log) if isinstance(log, str | os.PathLike) else log:
            # 0 is also what a log says that knows nothing of attempts.
            attempt = record.attempt or self._attempt + (record.step <= self._step)
            events += self._judge(_in_attempt(record, attempt))
        return events

    def state_dict(self) -> dict[str, Any]:
        """What the detectors remember, and where the run is: plain data of bounded size."""
        bands, *states = self._history[-1][1]
        return {
            "step": None if self._step == -math.inf else self._step,
            "attempt": self.attempt,
            "bands": bands,
            "detectors": dict(zip(self._keys, states, strict=True)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; `attempt` never falls, and steps seen here are not forgotten.

        Each detector takes up what was saved under its kind and metric; one that was not there
        starts empty.
        """
        missing = {"step", "attempt", "bands", "detectors"} - state.keys()
        if missing:
            raise ValueError(f"a state of a Monitor has {min(missing)!r}, got {list(state)!r:.80}")
        saved = state["detectors"]
        pairs = zip(self._keys, self.detectors, strict=True)
        loaded = (state["bands"], *(saved.get(key, d.init()) for key, d in pairs))
        step = -math.inf if state["step"] is None else state["step"]
        self._go_back(step)
        if len(self._history) == 1 and self._history[0][0] == -math.inf:
            # Nothing observed yet, so this is where the run starts, whatever its next step.
            self._history[0] = (-math.inf, loaded)
        self._history.append((step, loaded))
        self._attempt = max(self._attempt, state["attempt"])
        self._step = max(self._step, step)

    def _judge(self, record: StepRecord) -> list[Event]:
        """The events of a record; once all are there, the states they leave."""
        bands, *states = self._before(record.step)
        bands, onset = self._bands(bands, record)
        events: list[Event] = []
        after = [bands]
        for detector, state in zip(self.detectors, states, strict=True):
            state, found = answer(detector, state, record)
            after.append(state)
            if found:
                events += [_with_onset(event, onset) for event in found]
        self._go_back(record.step)
        self._history.append((record.step, tuple(after)))
        self._attempt, self._step = record.attempt, record.step
        return events

    def _before(self, step: int) -> States:
        """The states before `step`; empty ones if that is longer ago than is kept."""
        for seen, states in reversed(self._history):
            if seen < step:
                return states
        return self._empty()

    def _go_back(self, step: float) -> None:
        """Forget the states after `step` and later."""
        while self._history and self._history[-1][0] >= step:
            self._history.pop()

    def _empty(self) -> States:
        return (self._bands.init(), *(detector.init() for detector in self.detectors))


def _newest(sinks: Iterable[Sink]) -> tuple[int, float]:
    """Attempt and step of the newest record that earlier processes left in the sinks."""
    last = [sink.last() for sink in sinks if hasattr(sink, "last")]
    return max(((record.attempt, record.step) for record in last if record), default=_NOTHING)


def _in_attempt(record: StepRecord, attempt: int) -> StepRecord:
    return record if record.attempt == attempt else replace(record, attempt=attempt)


def _with_onset(event: Event, onset: tuple[int, str] | None) -> Event:
    if event.onset is not None:
        return event
    step, metric = onset or (event.step, event.metric)
    return replace(event, onset=step, onset_metric=metric)


def _keys(detectors: Sequence[Detector]) -> list[str]:
    """Kind, metric and position among those with the same of each detector."""
    names = [
        f"{getattr(detector, 'kind', type(detector).__name__)}/{getattr(detector, 'metric', '')}"
        for detector in detectors
    ]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


def _require_parts(detectors: Sequence[object], sinks: Sequence[object]) -> None:
    for detector in detectors:
        if isinstance(detector, type) or not (callable(detector) and hasattr(detector, "init")):
            raise TypeError(f"a detector has init() and can be called, got {detector!r:.80}")
    for sink in sinks:
        if isinstance(sink, type) or not callable(getattr(sink, "write", None)):
            raise TypeError(f"a sink has write(record, events), got {sink!r:.80}")
