"""A run as the report shows it, made in one pass over its log and in bounded memory."""

import math
from array import array
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass

from fastclip.monitor.bands import CALM
from fastclip.monitor.monitor import Monitor
from fastclip.monitor.records import LEVELS, Event, Level, StepRecord
from fastclip.monitor.report.evidence import Episode, Episodes, of_one
from fastclip.monitor.report.grid import Grid, at_fault
from fastclip.monitor.report.thinning import Thinned

# Fields of a record that are drawn as they are.
DRAWN = (
    *("loss", "val_loss", "grad_norm", "lr", "loss_scale"),
    *("activation_max", "param_norm", "update_ratio"),
)
RATED = 100  # records that the clip rate is taken over
MARKED = 400  # buckets of marked events
# Where events are marked whose metric has no chart of its own name.
CHARTS = {"val_loss": "loss", "nonfinite_count": "grad_norm", "clipped": "clip_rate"}


@dataclass
class Extreme:
    """The largest finite value of a metric, and how many were not finite."""

    value: float = -math.inf
    step: int = 0
    nonfinite: int = 0
    first_nonfinite: int = 0

    def add(self, step: int, value: float) -> None:
        if value > self.value and value != math.inf:
            self.value, self.step = value, step
        elif not math.isfinite(value):
            if not self.nonfinite:
                self.first_nonfinite = step
            self.nonfinite += 1


class Run:
    """What is known of a run; `add` its records, `amend` layers that came later, then `finish`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records = self.skipped = self.events = 0
        self.skipped_lines = 0  # of the log: not records
        self.first = self.last = 0  # steps
        self.attempts: set[int] = set()
        self.series: dict[str, Thinned] = {}
        self.lost: dict[str, Thinned] = {}  # where a value is not finite; the value is 0
        self.marks: dict[tuple[str, Level], Thinned] = {}  # events, by chart
        self.topped: dict[tuple[str, Level], Thinned] = {}  # those without a finite value there
        self.updates_left_out = Thinned(MARKED)
        self.levels: Counter[Level] = Counter()
        self.worst = {"loss": Extreme(), "grad_norm": Extreme()}
        self.final_loss: float | None = None
        self.norms = array("d")  # of what was not rolled back
        self._norm_steps = array("q")  # and the step of each
        self.clipped = self.clipped_known = 0
        self.grid = Grid()
        self.unlocated = 0  # records with elements that are not finite, and no row that says where
        self.episodes: list[Episode] = []  # when it is finished
        self._parts = Episodes(CALM)
        self._monitor = Monitor()
        self._recent: deque[bool] = deque(maxlen=RATED)
        self._recently = 0  # how many of them were clipped
        self._starts: list[tuple[int, int]] = []  # attempts and where they began, both ascending

    def add(self, record: StepRecord) -> None:
        events = self._monitor.replay((record,))
        attempt, step = self._monitor.attempt, record.step
        if not self.records:
            self.first = self.last = step
        self.records += 1
        self.first, self.last = min(self.first, step), max(self.last, step)
        if attempt not in self.attempts:
            self._begin(attempt, step)
        for name in DRAWN:
            value = getattr(record, name)
            if value is not None:
                self._draw(name, step, attempt, value)
        if record.loss is not None:
            self.final_loss = record.loss
        self._take_norm(step, record.grad_norm)
        if record.clipped is not None:
            self._rate(step, attempt, record.clipped)
        if record.skipped:
            self.skipped += 1
            self.updates_left_out.add(step, attempt, 0.0)
        if record.layers:
            self.grid.add(step, attempt, record.layers)
        if record.nonfinite_count and not any(map(at_fault, record.layers or ())):
            self.unlocated += 1
        if events:
            self._note(record, attempt, events)

    def amend(self, amendment: StepRecord) -> None:
        """Take in the layers that were added to a record later."""
        layers = amendment.layers or ()
        self.grid.add(amendment.step, amendment.attempt, layers)
        if self.unlocated and any(map(at_fault, layers)):
            self.unlocated -= 1  # counted when its record was added: that had no rows

    def finish(self) -> None:
        # As many steps as it takes to log the records that end an excursion; `fastclip replay`
        # has the same incidents.
        gap = CALM * max(1.0, (self.last - self.first) / self.records)
        merged = Episodes(gap)
        for part in self._parts.found:
            merged.add(part)
        self.episodes = merged.found

    def abandoned(self, step: int, attempt: int) -> bool:
        """Whether a later attempt went back to this step or to one before it."""
        after = bisect_right(self._starts, attempt, key=lambda start: start[0])
        return after < len(self._starts) and self._starts[after][1] <= step

    def shown(self, limit: int) -> list[tuple[int, Episode]]:
        """So many episodes with their numbers, in order: those of higher levels before others."""
        numbered = list(enumerate(self.episodes, 1))
        numbered.sort(key=lambda one: -LEVELS.index(one[1].incident.level))
        return sorted(numbered[:limit], key=lambda one: one[0])

    def _take_norm(self, step: int, norm: float | None) -> None:
        """A step that comes again takes the place of what came from there on."""
        while self._norm_steps and self._norm_steps[-1] >= step:
            self._norm_steps.pop()
            self.norms.pop()
        if norm is not None:
            self._norm_steps.append(step)
            self.norms.append(norm)

    def _begin(self, attempt: int, step: int) -> None:
        self.attempts.add(attempt)
        while self._starts and self._starts[-1][1] >= step:
            self._starts.pop()
        self._starts.append((attempt, step))

    def _draw(self, name: str, step: int, attempt: int, value: float) -> None:
        if name in self.worst:
            self.worst[name].add(step, value)
        if math.isfinite(value):
            series = self.series.get(name)
            if series is None:
                series = self.series[name] = Thinned()
            series.add(step, attempt, value)
        else:
            lost = self.lost.setdefault(name, Thinned(MARKED))
            lost.add(step, attempt, 0.0, str(value))

    def _rate(self, step: int, attempt: int, clipped: bool) -> None:
        self.clipped_known += 1
        self.clipped += clipped
        if len(self._recent) == RATED:
            self._recently -= self._recent[0]
        self._recent.append(clipped)
        self._recently += clipped
        rates = self.series.setdefault("clip_rate", Thinned())
        rates.add(step, attempt, self._recently / len(self._recent))

    def _note(self, record: StepRecord, attempt: int, events: list[Event]) -> None:
        kinds: dict[tuple[str, Level], list[str]] = {}
        for event in events:
            self.events += 1
            self.levels[event.level] += 1
            self._parts.add(of_one(event, attempt, record.batch))
            key = CHARTS.get(event.metric, event.metric), event.level
            kinds.setdefault(key, []).append(event.kind)
        for (chart, level), found in kinds.items():
            value = self._rate_now() if chart == "clip_rate" else getattr(record, chart)
            finite = value is not None and math.isfinite(value)
            marks = self.marks if finite else self.topped
            marked = marks.setdefault((chart, level), Thinned(MARKED))
            marked.add(record.step, attempt, value if finite else 0.0, ", ".join(found))

    def _rate_now(self) -> float:
        return self._recently / max(1, len(self._recent))
