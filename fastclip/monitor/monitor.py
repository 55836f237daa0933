"""The Monitor: observes records, as they come or from a log, and says what its detectors find."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastclip.monitor.bands import Bands, require_bands
from fastclip.monitor.detectors import Detector, default_detectors
from fastclip.monitor.detectors.contract import answer
from fastclip.monitor.layers import Carriers
from fastclip.monitor.log import JSONL
from fastclip.monitor.observed import Watch, given
from fastclip.monitor.records import Event, StepRecord
from fastclip.monitor.sinks.contract import Sink
from fastclip.monitor.telemetry import Row, Telemetry

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastclip.monitor.observed import Fields
    from fastclip.stats import GradStats

KEPT = 2000  # states to go back to
CLOSED = (
    "this Monitor is closed, and so are its sinks: make a new one, and to go on with the same run "
    "give it this one's state: new.load_state_dict(old.state_dict())"
)

States = tuple[Any, ...]  # of the bands, then of each detector

_NOTHING = (0, -math.inf)  # attempt and step before any record


class Monitor:
    """Watches a run.

    >>> with Monitor(sinks=[JSONL("run.jsonl")]) as monitor:
    ...     events = monitor.observe(step=step, loss=loss, stats=stats)

    Args:
        detectors: None means `default_detectors()`, an empty list none. Events of one record come
            in their order, each with the onset that the normal bands tell.
        sinks: where records and events go.
        telemetry: how long numbers on a device are waited for; None means `Telemetry()`.
        watches: of each of them what it measured is taken along.

    Where the step is not larger than the one before it, a new attempt begins: `attempt` grows by
    one, and detectors and bands take up the state they had before that step. The states of the
    last 2,000 records are kept for that; further back they start empty.

    Leaving the ``with``, by an exception or not, observes what is still being read back from a
    device and closes the sinks. Without it that is done when the process ends, or by `flush`; a
    process that is killed loses it. A copy (deepcopy, pickle) begins without it.

    An error of a sink is raised by the call that completed the record (`observe`, `flush`, `close`,
    `load_state_dict`, or `state_dict`, which is then to be called again), after all other work of
    that call: the other sinks have the record, and the next call returns its events. A detector
    that raises takes its record with it: no sink is given that.
    """

    def __init__(
        self,
        detectors: Iterable[Detector] | None = None,
        sinks: Iterable[Sink] = (),
        *,
        telemetry: Telemetry | None = None,
        watches: Iterable[Watch] = (),
    ) -> None:
        if detectors is None:
            detectors = default_detectors()
        self.detectors: tuple[Detector, ...] = _parts("detectors", detectors)
        self.sinks: tuple[Sink, ...] = _parts("sinks", sinks)
        self.watches: tuple[Watch, ...] = _parts("watches", watches)
        if not isinstance(telemetry, Telemetry | None):
            raise TypeError(f"telemetry must be a Telemetry, got {telemetry!r:.80}")
        self._attempt, self._step = _NOTHING  # of the newest record
        self._logged = _newest(self.sinks)  # the same in the logs that are continued
        self._bands = Bands()
        self._keys = _keys(self.detectors)
        # What the states were after which step. The first entry is from before any.
        self._history: deque[tuple[float, States]] = deque(maxlen=KEPT + 1)
        self._history.append((-math.inf, self._empty()))
        telemetry = Telemetry() if telemetry is None else telemetry
        self._carriers = Carriers(telemetry.layers_every, telemetry.layers_before)
        self._events: list[Event] = []  # found, and not yet returned
        self._busy = False  # judging or writing a record
        self._closed = False
        telemetry.join(self)
        self.telemetry = telemetry

    def __enter__(self) -> "Monitor":
        if self._closed:
            raise RuntimeError(CLOSED)
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, whose queue is empty
        vars(self).update(state)
        self.telemetry.join(self)

    def __del__(self) -> None:
        if hasattr(self, "telemetry") and self.telemetry:  # has rows that would be lost
            self._drain()

    @property
    def attempt(self) -> int:
        """Of the newest record; before there is one, of the log that a sink continues."""
        return max(self._attempt, self._logged[0])

    def observe(
        self, *, step: int, stats: "GradStats | None" = None, **fields: "Unpack[Fields]"
    ) -> list[Event]:
        """Take in what was measured in a step; the events of the records that are complete by now.

        Without tensors on a device that is this step's record. With some it is the one of two steps
        before (`Telemetry.lag`), and `Event.step` tells which; events found by `state_dict` and
        `load_state_dict` since the last call come first.

        `fields` are those of `StepRecord`. `stats` fills grad_norm, clip_coef, clipped,
        nonfinite_count and skipped, and of a step with a scaler loss_scale; what a watch measured
        wins over it, and a keyword over both. None is as good as missing. `layers` may also be a
        `LayerTable`. Numbers and NumPy scalars are read at once, tensors as `Telemetry` says.

        Raises `TypeError` for an unknown field and for a value that its field does not take (of a
        tensor when it is read), `RuntimeError` after `close`.
        """
        self._require_idle()
        if self._closed:
            raise RuntimeError(CLOSED)
        self.telemetry.put(given(step, stats, self.watches, fields))
        while (row := self.telemetry.due()) is not None:
            self._take(row)
        return self._found()

    def flush(self) -> list[Event]:
        """Wait for what is still being read back from a device, and observe it; its events.

        An error of one record does not hold back those after it.
        """
        self._drain()
        return self._found()

    def close(self) -> None:
        """Observe what is still being read back, then close the sinks. What `flush` returns after
        it are the events of that."""
        self._require_idle()
        if self._closed:
            return
        self._closed = True
        closing = [sink.close for sink in self.sinks if hasattr(sink, "close")]
        _call_all([self._drain, *closing])

    def replay(self, log: str | os.PathLike[str] | Iterable[StepRecord]) -> list[Event]:
        """Observe the records of a log, and write them to no sink; their events."""
        return list(self.replayed(log))

    def replayed(self, log: str | os.PathLike[str] | Iterable[StepRecord]) -> Iterator[Event]:
        """As `replay`, one event after another: records are observed as far as is asked for."""
        self._drain()
        for record in JSONL(log) if isinstance(log, str | os.PathLike) else log:
            # 0 is also what a log says that knows nothing of attempts.
            attempt = record.attempt or self._attempt + (record.step <= self._step)
            record = _in_attempt(record, attempt)
            found, states = self._judged(record)
            self._commit(record, states)
            yield from found

    def state_dict(self) -> dict[str, Any]:
        """What the detectors remember, and where the run is: plain data of bounded size.

        It is of all steps so far: what is still being read back is observed first, and the next
        `observe` or `flush` returns the events of that, too.
        """
        self._drain()
        judged, (bands, *states) = self._history[-1]
        return {
            "step": _or_none(self._step),
            "attempt": self.attempt,
            "judged": _or_none(judged),  # an earlier step, where a state was just loaded
            "bands": bands,
            "detectors": dict(zip(self._keys, states, strict=True)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; `attempt` never falls, and steps seen here are not forgotten.

        Each detector takes up what was saved under its kind and metric; one that was not there
        starts empty. What is still being read back is observed first, as for `state_dict`.
        """
        _require_state(state)
        self._require_idle()
        _call_all([self._drain, partial(self._load, state)])

    def _load(self, state: dict[str, Any]) -> None:
        saved = state["detectors"]
        pairs = zip(self._keys, self.detectors, strict=True)
        loaded = (state["bands"], *(saved.get(key, d.init()) for key, d in pairs))
        step, judged = (-math.inf if state[s] is None else state[s] for s in ("step", "judged"))
        self._go_back(judged)
        if len(self._history) == 1 and self._history[0][0] == -math.inf:
            # Nothing observed yet, so this is where the run starts, whatever its next step.
            self._history[0] = (-math.inf, loaded)
        self._history.append((judged, loaded))
        self._attempt = max(self._attempt, state["attempt"])
        self._step = max(self._step, step)

    def _drain(self) -> None:
        """Observe all rows that are queued; an error of one does not hold back the others."""
        self._require_idle()
        _call_all([self._take_next] * len(self.telemetry))

    def _take_next(self) -> None:
        self._take(self.telemetry.pop())

    def _take(self, row: Row) -> None:
        """Judge a row that has left the queue, and give it to the sinks."""
        try:
            self._busy = True
            self._judge_and_write(row)
        finally:
            self._busy = False

    def _judge_and_write(self, row: Row) -> None:
        record = self._numbered(row)
        record = self._carriers.counted(record, row.layers, row.measured)
        events, states = self._judged(record)
        amended: list[StepRecord] = []
        carrying = self._carriers.of_events(record, row.layers, events) if events else None
        if carrying is not None:
            amended = self._carriers.amended()
            if carrying is not record:  # as a replay of the log will judge it
                record = carrying
                events, states = self._judged(record)
        self._commit(record, states)
        self._carriers.keep(record, row.layers)
        self._events += events
        self._logged = _NOTHING
        if self.sinks:
            self._write(record, events, amended)

    def _write(self, record: StepRecord, events: list[Event], amended: list[StepRecord]) -> None:
        """Give a record to all sinks, whatever one of them raises."""
        calls: list[Callable[[], object]] = []
        for sink in self.sinks:
            calls.append(partial(sink.write, record, events))
            if amended and hasattr(sink, "amend"):
                calls += [partial(sink.amend, old) for old in amended]
        _call_all(calls)

    def _numbered(self, row: Row) -> StepRecord:
        """The record of a row; of the attempt that now goes on, unless it names one."""
        record = row.record()
        if row.numbered:
            return record
        newest = max(self._step, self._logged[1])
        return _in_attempt(record, self.attempt + (record.step <= newest))

    def _found(self) -> list[Event]:
        """The events that were not yet returned."""
        events, self._events = self._events, []
        return events

    def _require_idle(self) -> None:
        if self._busy:
            raise RuntimeError(
                "a detector or a sink called its own Monitor, which is in the middle of a record"
            )

    def _judged(self, record: StepRecord) -> tuple[list[Event], States]:
        """The events of a record, and the states it leaves."""
        bands, *states = self._before(record.step)
        bands, onset = self._bands(bands, record)
        events: list[Event] = []
        after = [bands]
        for detector, state in zip(self.detectors, states, strict=True):
            state, found = answer(detector, state, record)
            after.append(state)
            if found:
                events += [_with_onset(event, onset) for event in found]
        return events, tuple(after)

    def _commit(self, record: StepRecord, states: States) -> None:
        self._go_back(record.step)
        self._history.append((record.step, states))
        self._attempt, self._step = record.attempt, record.step

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


def _or_none(step: float) -> float | None:
    return None if step == -math.inf else step


def _require_state(state: dict[str, Any]) -> None:
    """`ValueError` or `TypeError` for what is no state of a Monitor with these bands."""
    if not isinstance(state, dict):
        raise TypeError(f"a state of a Monitor is a dict, got {state!r:.80}")
    missing = {"step", "attempt", "judged", "bands", "detectors"} - state.keys()
    if missing:
        raise ValueError(f"a state of a Monitor has {min(missing)!r}, got {list(state)!r:.80}")
    for name, none in (("step", True), ("attempt", False), ("judged", True)):
        value = state[name]
        if not (isinstance(value, int) or (none and value is None)):
            raise TypeError(f"{name} of a state is a whole number, got {value!r:.80}")
    if not isinstance(state["detectors"], dict):
        raise TypeError(f"the detectors of a state are a dict, got {state['detectors']!r:.80}")
    require_bands(state["bands"])


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


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls, whatever one of them raises: then the last error, with those before as its
    context. By halves, for one within the other is as deep as Python allows for 1,000 that fail."""
    if len(calls) < 2:
        for call in calls:
            call()
        return
    half = len(calls) // 2
    try:
        _call_all(calls[:half])
    finally:
        _call_all(calls[half:])


def _keys(detectors: Sequence[Detector]) -> list[str]:
    """Kind, metric and position among those with the same of each detector."""
    names = [
        f"{getattr(detector, 'kind', type(detector).__name__)}/{getattr(detector, 'metric', '')}"
        for detector in detectors
    ]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


# What a part has, and whether something has it, by the argument that it is given as.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "detectors": (
        "a detector has init() and can be called",
        lambda part: callable(part) and hasattr(part, "init"),
    ),
    "sinks": (
        "a sink has write(record, events)",
        lambda part: callable(getattr(part, "write", None)),
    ),
    "watches": ("a watch has take()", lambda part: callable(getattr(part, "take", None))),
}


def _parts(name: str, given: Any) -> tuple[Any, ...]:
    """Those given. `TypeError` for others than of their kind, and for one that is not in a list."""
    needed, fits = _KINDS[name]
    # A log by itself can be iterated too: an empty one would be no sinks.
    if not isinstance(given, Iterable) or _hint(given):
        raise TypeError(f"{name} must be a list of them, got {given!r:.80}{_hint(given)}")
    parts = tuple(given)
    for part in parts:
        if isinstance(part, type) or not fits(part):
            raise TypeError(f"{needed}, got {part!r:.80}{_hint(part)}")
    return parts


def _hint(part: Any) -> str:
    for name, (_, fits) in _KINDS.items():
        if fits(part) and not isinstance(part, type):
            return f"; pass it as {name}=[...]"
    return ""
