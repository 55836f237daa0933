"""Values that rose and do not come back."""

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from fastclip.monitor import robust
from fastclip.monitor.detectors.contract import (
    require_metric,
    require_positive,
    require_window,
    set_field,
)
from fastclip.monitor.records import Event, StepRecord
from fastclip.monitor.windows import EMPTY, Ordered, Window, oldest


@dataclass(frozen=True)
class Sustained:
    """The last `window` values: all over `sustained`, one over `critical` times the median of the
    100 values before them. A spike that does not come back.

    The form, a minimum over one bound and a maximum over another, is that of the K2-V2 report
    (LLM360), section 3.5; the bounds are fastclip's own.

    Args:
        metric: a number of `StepRecord`, by its name.
        window: recorded values, at least 1.
        sustained: what all of them exceed, in medians; over 0.
        critical: what the largest exceeds, in medians; over 0.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    metric: str = "loss"
    window: int = 5
    sustained: float = 1.15
    critical: float = 1.5

    kind: ClassVar[str] = "sustained"
    baseline: ClassVar[int] = 100  # how many values the median is of
    _recent: Ordered = field(init=False, repr=False, compare=False)
    _before: Ordered = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_metric(self.metric)
        require_window(self.window)
        require_positive("sustained", self.sustained)
        require_positive("critical", self.critical)
        set_field(self, "_recent", Ordered(self.window))
        set_field(self, "_before", Ordered(self.baseline))

    def init(self) -> tuple[Window, Window]:
        return EMPTY, EMPTY

    def __call__(
        self, state: tuple[Window, Window], record: StepRecord
    ) -> tuple[tuple[Window, Window], list[Event]]:
        value = getattr(record, self.metric)
        if value is None or not isfinite(value):
            return state, []
        events = []
        recent, values = self._recent.take(state[0])
        earlier = state[1]
        if len(values) == self.window:  # the oldest of them moves on to the earlier ones
            earlier, before = self._before.take(earlier)
            earlier = self._before.push(earlier, before, oldest(recent))
            recent = self._recent.push(recent, values, value)
            if len(before) == self.baseline:
                median = robust.median(before)
                low, high = values[0], values[-1]
                if median > 0 and low > self.sustained * median and high > self.critical * median:
                    events.append(self._event(record.step, value, low, high, median))
        else:
            recent = self._recent.push(recent, values, value)
        return (recent, earlier), events

    def _event(self, step: int, value: float, low: float, high: float, median: float) -> Event:
        message = (
            f"the last {self.window} values of {self.metric} lie between {low:.6g} and {high:.6g}, "
            f"{low / median:.3g} and {high / median:.3g} times the median {median:.6g} of the "
            f"{self.baseline} before them"
        )
        return Event(step, self.kind, "critical", self.metric, value, median, message=message)


@dataclass(frozen=True)
class Drift:
    """The median of the last `window` values is over `ratio` times the best such median so far.

    For slow divergence, which a trailing mean follows. Small is good. A rule of fastclip's own.

    Args:
        metric: a number of `StepRecord`, by its name.
        window: recorded values, at least 1.
        ratio: over 0.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    metric: str = "loss"
    window: int = 50
    ratio: float = 1.10

    kind: ClassVar[str] = "drift"
    _recent: Ordered = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_metric(self.metric)
        require_window(self.window)
        require_positive("ratio", self.ratio)
        set_field(self, "_recent", Ordered(self.window))

    def init(self) -> tuple[Window, float | None]:
        return EMPTY, None

    def __call__(
        self, state: tuple[Window, float | None], record: StepRecord
    ) -> tuple[tuple[Window, float | None], list[Event]]:
        value = getattr(record, self.metric)
        if value is None or not isfinite(value):
            return state, []
        events = []
        best = state[1]
        window, values = self._recent.take(state[0])
        window = self._recent.push(window, values, value)
        if len(values) == self.window:
            median = robust.median(values)
            if best is None or median < best:
                best = median
            elif best > 0 and median > self.ratio * best:
                events.append(self._event(record.step, median, best))
        return (window, best), events

    def _event(self, step: int, median: float, best: float) -> Event:
        message = (
            f"the median {median:.6g} of the last {self.window} values of {self.metric} is "
            f"{median / best:.3g} times the best so far, {best:.6g}"
        )
        return Event(step, self.kind, "warn", self.metric, median, best, message=message)
