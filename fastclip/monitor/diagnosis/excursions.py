"""A detector that tells how loss and gradient norm left their bands: in which order, for how long.

Nothing here judges: `Bands` does. The events are for `gathering`, and no alarms.
"""

from math import isfinite
from typing import ClassVar, NamedTuple

from fastclip.monitor import bands as normal
from fastclip.monitor import robust
from fastclip.monitor.records import WATCHED, Event, StepRecord
from fastclip.monitor.windows import EMPTY, values_of

EXCURSION = "excursion"  # an excursion of any metric goes on; the value: records inside since
GRADIENT_FIRST = "gradient_first"  # grad_norm left before the loss: one event for each of them
LEFT = "loss_left"
RETURNED = "loss_returned"  # its step: that of leaving; the value: the worst on the way
OUTSIDE = "records_outside"  # with RETURNED; the value: how many losses were outside
LEVEL = "loss_level"  # the loss stayed outside for so long that its band starts afresh

_PLACES = {name: place for place, name in enumerate(WATCHED)}


class Left(NamedTuple):
    """A metric that is outside: since when, its worst value, the median of its band, the onset of
    the excursion and the metric it began with, and how many of its values were outside."""

    step: int
    worst: float
    median: float | None
    onset: int
    onset_metric: str
    values: int = 1


class State(NamedTuple):
    """`gradient`: how it left in this excursion; `lost`: whether the loss has left in it;
    `out`: the loss while it is outside."""

    bands: normal.State
    gradient: Left | None = None
    lost: bool = False
    out: Left | None = None


class Excursions:
    """See above. Gradients of a skipped step that are not finite do not count as having left: they
    moved nothing."""

    kind: ClassVar[str] = EXCURSION

    def __init__(self) -> None:
        self._bands = normal.Bands()

    def init(self) -> State:
        return State(self._bands.init())

    def __call__(self, state: State, record: StepRecord) -> tuple[State, list[Event]]:
        bands, left = self._bands.judge(state.bands, record)
        excursion = bands[1]
        if excursion is None and state.out is None:
            return State(bands), []
        if excursion is None:
            gradient, lost, events = None, False, []
        else:
            gradient, lost = state.gradient, state.lost
            inside = float(excursion[2])
            events = [Event(record.step, EXCURSION, "info", excursion[1], inside)]
        norm = record.grad_norm
        if gradient is None and "grad_norm" in left and (not record.skipped or _finite(norm)):
            gradient = _left(state.bands, bands, record, "grad_norm")
        out = state.out
        if "loss" in left:
            if not lost and gradient is not None and gradient.step < record.step:
                loss = _left(state.bands, bands, record, "loss")
                events += [_event(GRADIENT_FIRST, "grad_norm", gradient)]
                events += [_event(GRADIENT_FIRST, "loss", loss)]
            lost = True
            out = _longer(out, state.bands, bands, record, events)
        elif out is not None and record.loss is not None:
            events += _returned(out, record)
            out = None
        return State(bands, gradient, lost, out), events


def _longer(
    out: Left | None,
    before: normal.State,
    after: normal.State,
    record: StepRecord,
    events: list[Event],
) -> Left | None:
    """How the loss is outside, with that of `record`; None once its band starts afresh."""
    loss = record.loss
    assert loss is not None  # it is outside
    if out is None:
        out = _left(before, after, record, "loss")
        events.append(_event(LEFT, "loss", out))
    else:
        worse = isfinite(out.worst) and not loss <= out.worst  # a NaN is worse, too
        out = out._replace(values=out.values + 1, worst=loss if worse else out.worst)
    if after[0][_PLACES["loss"]] != (EMPTY, 0):
        return out
    if not isfinite(out.worst):  # no level
        return out
    text = f"{normal.RESTART} losses in a row outside, the worst {out.worst:.6g}"
    events.append(_event(LEVEL, "loss", out, text))
    return None


def _returned(out: Left, record: StepRecord) -> list[Event]:
    losses = "1 loss" if out.values == 1 else f"{out.values} losses"
    text = f"{losses} outside, the worst {out.worst:.6g}; inside again at step {record.step}"
    return [
        _event(RETURNED, "loss", out, text),
        Event(record.step, OUTSIDE, "info", "loss", float(out.values)),
    ]


def _left(before: normal.State, after: normal.State, record: StepRecord, metric: str) -> Left:
    values = sorted(values_of(before[0][_PLACES[metric]][0]))
    assert after[1] is not None  # the metric is outside, so there is an excursion
    onset, first = after[1][:2]
    median = robust.median(values) if values else None
    return Left(record.step, getattr(record, metric), median, onset, first)


def _event(kind: str, metric: str, left: Left, text: str = "") -> Event:
    onset = left.onset, left.onset_metric
    return Event(left.step, kind, "info", metric, left.worst, left.median, *onset, text)


def _finite(value: float | None) -> bool:
    return value is not None and isfinite(value)
