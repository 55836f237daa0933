"""One pass over a log: the facts of the decision table, each with the records it rests on."""

from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from fastclip.monitor.bands import CALM
from fastclip.monitor.detectors import Skips, default_detectors
from fastclip.monitor.diagnosis import excursions, table
from fastclip.monitor.diagnosis.counting import Rates, Skipped
from fastclip.monitor.diagnosis.result import Evidence, Seen
from fastclip.monitor.monitor import Monitor
from fastclip.monitor.records import Event, StepRecord

SHOWN = 3  # records a fact keeps
RECENT = 200  # batches remembered: an excursion is rarely older when an alarm tells of it
HELD = 100  # records after which the loss scale has found its level
NORMS = 10_000  # the last norms inside their band that a threshold is made of
LOSSES = ("loss", "val_loss")
COUNTED = ("grad_norm", "loss_scale")

# Kinds of events that are a fact by themselves; those of others depend on metric and record.
_FACTS = {
    "loss_scale_drop": table.SCALE_FALLS,
    "sustained": table.SUSTAINED,
    "drift": table.DRIFT,
    "clip_rate": table.CLIPPING,
    "skips": table.SKIPPING,
    excursions.GRADIENT_FIRST: table.GRADIENT_FIRST,
    excursions.RETURNED: table.RETURNED,
    excursions.LEVEL: table.LEVEL,
}


@dataclass
class _Found:
    """Of a fact: its first event and record, and what came since."""

    event: Event
    record: StepRecord
    message: str
    count: int = 0
    last: int = 0
    attempt: int = 0
    seen: list[Seen] = field(default_factory=list)
    told: tuple[int, int] | None = None  # step and attempt of the last event
    batches: tuple[Any, Any] | None = None  # of the step before the onset, and of the alarm


class Gathering:
    """What the records added so far show; its size does not grow with their number.

    `counts`: how many records there were, how many had a loss and each of `COUNTED`, losses that
    are not positive, and gradients that are not finite in steps that do not say whether they were
    skipped. `losses`: the most finite ones in one attempt. `outside`: how many losses each visit
    outside the band took. `scale`: the lowest that LossScaleDrop told; `held`: records with one
    since it told that. `norms`: the last of those that are outside all excursions, before the first
    GRADIENT_FIRST. `lost`: how often the loss ceased to be finite with parameters that no step had
    spoiled before; `spoiled`: whether one had when it first did. `step`: of the last record.
    What was rolled back is kept apart: `evidence` is of what counts, `abandoned` of the rest.
    """

    def __init__(self) -> None:
        self._monitor = Monitor([*default_detectors(), Skips(), excursions.Excursions()])
        self._found: dict[str, _Found] = {}  # in the order in which they were
        self._abandoned: dict[str, _Found] = {}  # of the last attempt that was rolled back with it
        self._open: _Found | None = None  # the loss is outside its band
        self._stuck: _Found | None = None  # the loss is not finite
        self._norms: deque[tuple[int, float]] = deque(maxlen=NORMS)
        self._batches: deque[tuple[int, Any]] = deque(maxlen=RECENT)
        self._finite: int | None = None  # the first step with a finite loss
        self._calm = 0  # finite losses since the last event of Sustained or Drift
        self.counts: Counter[str] = Counter()
        self.losses = self._losses = 0
        self.outside: Counter[int] = Counter()
        self.scale = inf
        self.held = self.lost = self.step = 0
        self.spoiled = self._taken = False  # a step with gradients that are not finite was taken
        self.rates, self.skipped = Rates(), Skipped()

    @property
    def attempt(self) -> int:
        return self._monitor.attempt

    @property
    def norms(self) -> list[float]:
        return [norm for _, norm in self._norms]

    def add(self, record: StepRecord) -> None:
        before = self.attempt
        events = self._monitor.replay((record,))
        if self.attempt != before:
            self._go_back(record.step)
        self._count(record)
        self._batches.append((record.step, record.batch))
        self.step = record.step
        self.rates.add(record)
        self.skipped.add(record)
        self.held += record.loss_scale is not None
        loss = record.loss
        if loss is not None and isfinite(loss):
            self._stuck, self._taken = None, False
            self._calm += 1
            if self._finite is None:
                self._finite = record.step
        for event in events:
            for fact in self._facts(event, record):
                self._keep(fact, event, record)
        for lasting in (self._open, self._stuck):
            if lasting is not None and loss is not None:
                lasting.count += 1
                lasting.last = record.step
        if table.GRADIENT_FIRST not in self._found and record.grad_norm is not None:
            calm = not any(event.kind == excursions.EXCURSION for event in events)
            if calm and not record.skipped:
                self._norms.append((record.step, record.grad_norm))

    def evidence(self) -> dict[str, Evidence]:
        """By fact, in the order in which they were first seen; nothing that was rolled back."""
        found = {self._settled(fact, one): one for fact, one in self._found.items()}
        if self._stuck is not None:
            found.setdefault(table.STUCK, self._stuck)
        elif self._open is not None:
            found[table.OPEN] = self._open
        return {fact: _evidence(fact, one, abandoned=False) for fact, one in found.items()}

    def abandoned(self) -> dict[str, Evidence]:
        """The same of facts all of whose records were rolled back, each of the last attempt that
        showed it."""
        return {fact: _evidence(fact, one, abandoned=True) for fact, one in self._abandoned.items()}

    def finite_before(self, step: int) -> bool:
        """Whether there was a finite loss before `step`."""
        return self._finite is not None and self._finite < step

    def _settled(self, fact: str, found: _Found) -> str:
        """The fact as it stands where the log ends."""
        if fact == table.LOSS_NONFINITE and self._stuck and found.count == self._stuck.count:
            return table.STUCK  # the same records
        if fact == table.SCALE_FALLS and self.held >= HELD and self.scale >= 1:
            return table.SCALE_HELD  # below 1, small gradients are lost
        if self._calm >= CALM and self._open is None:
            return table.BACK.get(fact, fact)
        return fact

    def _go_back(self, step: int) -> None:
        """A new attempt begins at `step`: what came from there on was for nothing."""
        self._losses, self._calm, self._open, self._stuck = 0, 0, None, None
        self.held, self._taken, self.skipped = 0, False, Skipped()
        for fact, found in [*self._found.items()]:
            if found.event.step >= step:
                self._abandoned[fact] = self._found.pop(fact)
        for kept in (self._norms, self._batches):
            while kept and kept[-1][0] >= step:
                kept.pop()

    def _count(self, record: StepRecord) -> None:
        counts = self.counts
        counts["records"] += 1
        loss = record.loss
        if loss is not None:
            counts["loss"] += 1
            if isfinite(loss):
                self._losses += 1
                self.losses = max(self.losses, self._losses)
                counts["not positive"] += loss <= 0
        for name in COUNTED:
            if getattr(record, name) is not None:
                counts[name] += 1

    def _facts(self, event: Event, record: StepRecord) -> tuple[str, ...]:
        """The facts that an event is of; the state of the loss, on the way."""
        kind, metric = event.kind, event.metric
        if kind == "nonfinite":
            return self._nonfinite(event, record)
        if kind == "robust_spike" and metric == "grad_norm":
            return (table.GRADIENT_SPIKE,)
        if kind == excursions.LEFT:
            self._open = self._lasting(event, record)
        elif kind in (excursions.RETURNED, excursions.LEVEL):
            self._open = None
        elif kind == excursions.OUTSIDE:
            self.outside[int(event.value)] += 1
        elif kind == "loss_scale_drop":
            self.scale, self.held = min(self.scale, event.value), 0
        elif kind in ("sustained", "drift"):
            self._calm = 0
        return (_FACTS[kind],) if kind in _FACTS else ()

    def _nonfinite(self, event: Event, record: StepRecord) -> tuple[str, ...]:
        if event.metric in LOSSES:
            if event.metric == "loss" and self._stuck is None:
                self._stuck = self._lasting(event, record)
                if table.LOSS_NONFINITE not in self._found:
                    self.lost, self.spoiled = 0, self._taken
                self.lost += not self._taken
            return (table.LOSS_NONFINITE,)
        if event.metric not in ("grad_norm", "nonfinite_count"):
            return (table.OTHER_NONFINITE,)
        if record.skipped:
            return (table.OVERFLOWS,)
        self.counts["perhaps skipped"] += record.skipped is None
        self._taken = True
        if record.loss is not None and isfinite(record.loss):
            return (table.BACKWARD_NONFINITE,)
        return (table.GRADIENT_NONFINITE,)

    def _lasting(self, event: Event, record: StepRecord) -> _Found:
        seen = [_seen(event, self.attempt)]
        return _Found(event, record, event.message, attempt=self.attempt, seen=seen)

    def _keep(self, fact: str, event: Event, record: StepRecord) -> None:
        found = self._found.get(fact)
        if found is None:
            message = event.message + _layers_at_fault(record, fact)
            found = self._found[fact] = _Found(event, record, message)
            found.batches = self._suspects(event)
        # One record gives two events where a norm is not finite and elements are counted, and
        # GRADIENT_FIRST has one for the gradient and one for the loss.
        again = found.told == (event.step, self.attempt)
        half = fact == table.GRADIENT_FIRST and event.metric != "loss"
        found.count += not (again or half)
        found.told = event.step, self.attempt
        found.last, found.attempt = max(found.last, event.step), self.attempt
        if len(found.seen) < SHOWN and not again:
            found.seen.append(_seen(event, self.attempt))

    def _suspects(self, event: Event) -> tuple[Any, Any] | None:
        """The batches that a rollback for `event` leaves out: the first and the last of them."""
        first = max(0, (event.step if event.onset is None else event.onset) - 1)
        if self._batches[0][0] > first and len(self._batches) == RECENT:
            return None  # forgotten
        found = [batch for step, batch in self._batches if first <= step <= event.step]
        return (found[0], found[-1]) if found and None not in (found[0], found[-1]) else None


def _seen(event: Event, attempt: int) -> Seen:
    return Seen(event.step, attempt, event.metric, event.value, event.baseline)


def _layers_at_fault(record: StepRecord, fact: str) -> str:
    """A backward pass starts at the last layer, and NaN runs on to the first."""
    rows = [row for row in record.layers or () if row.nonfinite is not None]
    names = [row.name for row in rows if row.nonfinite]
    gradients = (table.GRADIENT_NONFINITE, table.OVERFLOWS, table.BACKWARD_NONFINITE)
    if fact not in gradients or not names:
        return ""
    those = f"all {len(rows)}" if len(names) == len(rows) else f"{len(names)} of {len(rows)}"
    text = f"; such elements are in {those} layers, the last of them {names[-1]}"
    if record.loss is not None and not isfinite(record.loss):
        return f"{text}, and the loss is not finite either"
    above = "at it or above it, where the backward pass comes from"
    return f"{text}: the cause is {above}"


def _evidence(fact: str, found: _Found, abandoned: bool) -> Evidence:
    event = found.event
    onset = event.step if event.onset is None else event.onset
    return Evidence(
        *(fact, found.count, event.step, found.last, found.attempt),
        *(onset, event.onset_metric or event.metric, found.record.batch, found.record.lr),
        *(abandoned, tuple(found.seen), found.message, found.batches),
    )
