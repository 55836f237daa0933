"""Numbers that left their range, and what keeps them in it: the loss scale and the clip."""

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from fastclip.checks import require
from fastclip.monitor.detectors.contract import require_window, set_field
from fastclip.monitor.records import LEVELS, WATCHED, Event, Level, StepRecord
from fastclip.monitor.windows import EMPTY, Summed, Window


@dataclass(frozen=True)
class NonFinite:
    """A loss, norm, maximum or ratio that is NaN or infinite; gradient elements that are.

    It looks at `loss`, `val_loss`, `grad_norm`, `activation_max`, `param_norm` and `update_ratio`,
    and at a `nonfinite_count` over 0. One event for each, from the first record on: critical, and
    warn where the step was skipped.
    """

    kind: ClassVar[str] = "nonfinite"

    def init(self) -> tuple[()]:
        return ()

    def __call__(self, state: tuple[()], record: StepRecord) -> tuple[tuple[()], list[Event]]:
        events = []
        for metric in WATCHED:
            value = getattr(record, metric)
            if value is not None and not isfinite(value):
                events.append(self._event(record, metric, value, None, f"{metric} is {value}"))
        count = record.nonfinite_count
        if count:
            message = f"{count} gradient element{'s are' if count > 1 else ' is'} NaN or infinite"
            events.append(self._event(record, "nonfinite_count", count, 0, message))
        return state, events

    def _event(
        self, record: StepRecord, metric: str, value: float, baseline: float | None, message: str
    ) -> Event:
        if record.skipped:
            message += "; the step was skipped"
        level: Level = "warn" if record.skipped else "critical"
        return Event(record.step, self.kind, level, metric, value, baseline, message=message)


@dataclass(frozen=True)
class LossScaleDrop:
    """A loss scale under the one before it, the `drops`-th time or a later one within `window`.

    A dynamic scale drops now and then to find its limit. One that keeps dropping says that the
    backward pass overflows at any scale.

    Args:
        drops: how many drops are too many, at least 1.
        window: recorded scales within which they are counted, at least `drops`.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    drops: int = 3
    window: int = 100

    kind: ClassVar[str] = "loss_scale_drop"
    metric: ClassVar[str] = "loss_scale"

    def __post_init__(self) -> None:
        require_window(self.drops, "drops")
        require_window(self.window)
        if self.drops > self.window:
            raise ValueError(f"{self.drops} drops do not fit into a window of {self.window}")

    def init(self) -> tuple[float | None, int, tuple[int, ...]]:
        """The last scale, how many were recorded, and which of them were the last few drops."""
        return None, 0, ()

    def __call__(
        self, state: tuple[float | None, int, tuple[int, ...]], record: StepRecord
    ) -> tuple[tuple[float | None, int, tuple[int, ...]], list[Event]]:
        scale = record.loss_scale
        if scale is None or not isfinite(scale):
            return state, []
        before, count, drops = state
        count += 1
        events = []
        if before is not None and scale < before:
            drops = (*drops, count)[-self.drops :]
            if len(drops) == self.drops and drops[0] > count - self.window:
                events.append(self._event(record.step, scale, before))
        return (scale, count, drops), events

    def _event(self, step: int, scale: float, before: float) -> Event:
        message = (
            f"the loss scale fell from {before:.6g} to {scale:.6g}, and at least {self.drops} "
            f"times in the last {self.window} steps"
        )
        return Event(step, self.kind, "warn", self.metric, scale, before, message=message)


@dataclass(frozen=True)
class ClipRate:
    """More than the share `over` of the last `window` steps was clipped.

    Args:
        over: at least 0 and under 1.
        window: recorded steps, at least 1.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    over: float = 0.5
    window: int = 100

    kind: ClassVar[str] = "clip_rate"
    metric: ClassVar[str] = "clipped"
    _recent: Summed = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require("over", self.over, "a share of at least 0 and under 1", lambda x: 0 <= x < 1)
        require_window(self.window)
        set_field(self, "_recent", Summed(self.window))

    def init(self) -> Window:
        return EMPTY

    def __call__(self, state: Window, record: StepRecord) -> tuple[Window, list[Event]]:
        if record.clipped is None:
            return state, []
        events = []
        window, total = self._recent.take(state)
        window = self._recent.push(window, total, float(record.clipped))
        if total.count == self.window and (rate := total.mean()) > self.over:
            message = f"{100 * rate:.3g} % of the last {self.window} steps were clipped"
            events.append(
                Event(record.step, self.kind, "warn", self.metric, rate, self.over, message=message)
            )
        return window, events


@dataclass(frozen=True)
class Skips:
    """An update that was skipped, the `streak`-th in a row or a later one.

    A skipped step does no harm, but a run that skips every step learns nothing. Steps whose
    `skipped` is None are passed over.

    Args:
        streak: how many in a row, at least 1.
        level: of the events: "info", "warn" or "critical".

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    streak: int = 10
    level: Level = "critical"

    kind: ClassVar[str] = "skips"
    metric: ClassVar[str] = "skipped"

    def __post_init__(self) -> None:
        require_window(self.streak, "streak")
        if self.level not in LEVELS:
            names = ", ".join(map(repr, LEVELS))
            raise ValueError(f"level must be one of {names}, got {self.level!r:.80}")

    def init(self) -> int:
        """How many of the last updates were skipped, in a row."""
        return 0

    def __call__(self, state: int, record: StepRecord) -> tuple[int, list[Event]]:
        if record.skipped is None:
            return state, []
        skipped = state + 1 if record.skipped else 0
        if skipped < self.streak:
            return skipped, []
        message = f"the last {skipped} updates were skipped"
        if skipped == 1:
            message = "the update was skipped"
        event = Event(
            record.step, self.kind, self.level, self.metric, skipped, self.streak, message=message
        )
        return skipped, [event]
