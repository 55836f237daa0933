"""A value that stands out from those before it."""

import math
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
from fastclip.monitor.windows import EMPTY, Ordered, Summed, Window


@dataclass(frozen=True)
class Spike:
    """A value of at least `ratio` times the mean of the last `window` values before it.

    The usual rule of thumb. The mean follows a loss that rises slowly: that is for `Drift`.

    Args:
        metric: a number of `StepRecord`, by its name.
        ratio: over 0.
        window: recorded values, at least 1.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    metric: str = "loss"
    ratio: float = 1.5
    window: int = 100

    kind: ClassVar[str] = "spike"
    _before: Summed = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_metric(self.metric)
        require_positive("ratio", self.ratio)
        require_window(self.window)
        set_field(self, "_before", Summed(self.window))

    def init(self) -> Window:
        return EMPTY

    def __call__(self, state: Window, record: StepRecord) -> tuple[Window, list[Event]]:
        value = getattr(record, self.metric)
        if value is None or not isfinite(value):
            return state, []
        events = []
        window, total = self._before.take(state)
        if total.count == self.window:
            mean = total.mean()
            if mean > 0 and value >= self.ratio * mean:
                events.append(self._event(record.step, value, mean))
        return self._before.push(window, total, value), events

    def _event(self, step: int, value: float, mean: float) -> Event:
        message = (
            f"{self.metric} {value:.6g} is {value / mean:.3g} times the mean {mean:.6g} of the "
            f"{self.window} values before it"
        )
        return Event(step, self.kind, "warn", self.metric, value, mean, message=message)


@dataclass(frozen=True)
class RobustSpike:
    """A value more than `k` robust standard deviations above the median of those before it.

    Of the last `window` values, with m their median and MAD the median of ``abs(x - m)``::

        value - m > k * max(1.4826 * MAD, 1e-3 * abs(m))

    Of a normal distribution 1.4826 * MAD is the standard deviation, and a few outliers hardly
    change it: this is the modified z-score of Iglewicz and Hoaglin (1993), upwards only, with a
    least spread. With `log` all of it is of logarithms (for gradient norms, which spread by
    factors), the least spread is 1e-3, and values at or below zero are passed over.

    Values need all their digits: where they were rounded so that most of a window are equal, as
    norms of 0.22 and 0.23 are late in a run, the MAD is 0 and the next larger number stands out.

    Args:
        metric: a number of `StepRecord`, by its name.
        k: robust standard deviations, over 0.
        window: recorded values, at least 1.
        log: judge the logarithms.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    metric: str
    k: float = 7.0
    window: int = 100
    log: bool = False

    kind: ClassVar[str] = "robust_spike"
    _before: Ordered = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_metric(self.metric)
        require_positive("k", self.k)
        require_window(self.window)
        set_field(self, "_before", Ordered(self.window))

    def init(self) -> Window:
        return EMPTY

    def __call__(self, state: Window, record: StepRecord) -> tuple[Window, list[Event]]:
        value = getattr(record, self.metric)
        if value is None or not isfinite(value) or (self.log and value <= 0):
            return state, []
        events = []
        window, before = self._before.take(state)
        if len(before) == self.window:
            log = self.log and before[0] > 0  # a state from before `log` was set may have others
            if robust.exceeds(before, value, self.k, log):
                median = robust.center(before, log)
                event = self._event(record.step, value, math.exp(median) if log else median)
                events.append(event)
        return self._before.push(window, before, value), events

    def _event(self, step: int, value: float, median: float) -> Event:
        message = (
            f"{self.metric} {value:.6g} is more than {self.k:g} robust standard deviations above "
            f"the median {median:.6g} of the {self.window} values before it"
        )
        return Event(step, self.kind, "warn", self.metric, value, median, message=message)
