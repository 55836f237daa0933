"""Normal bands: when did the first metric leave the ordinary, and which was it?"""

from math import isfinite

from fastclip.monitor import robust
from fastclip.monitor.records import WATCHED, StepRecord
from fastclip.monitor.windows import EMPTY, Ordered, Window

WINDOW = 100  # values a band is made of
JUDGED = 20  # as many have to be there before one is judged
K = 7.0  # robust standard deviations above the median at which a band ends
RESTART = 100  # so many values outside in a row are the new normal
CALM = 10  # so many records in a row inside all bands end an excursion

Band = tuple[Window, int]  # the values inside; how many outside came since
Excursion = tuple[int, str, int]  # its first step; what left first; records inside since
State = tuple[tuple[Band, ...], Excursion | None]


class Bands:
    """The bands of `WATCHED`, one for each, and the excursion that is going on, if any.

    A value is outside if it is not finite or if its robust z-score over the values inside is over
    7: upwards only, and in logarithms if it and they are positive. Called as a detector is; gives
    the excursion's first step and metric where a detector gives events.
    """

    def __init__(self) -> None:
        self._windows = tuple(Ordered(WINDOW) for _ in WATCHED)

    def init(self) -> State:
        return ((EMPTY, 0),) * len(WATCHED), None

    def __call__(self, state: State, record: StepRecord) -> tuple[State, tuple[int, str] | None]:
        state, _ = self.judge(state, record)
        excursion = state[1]
        return state, excursion and excursion[:2]

    def judge(self, state: State, record: StepRecord) -> tuple[State, tuple[str, ...]]:
        """The state after `record`, and the metrics that are outside their bands in it."""
        bands, excursion = list(state[0]), state[1]
        left: tuple[str, ...] = ()
        for place, metric in enumerate(WATCHED):
            value = getattr(record, metric)
            if value is None:
                continue
            bands[place], outside = _judged(self._windows[place], bands[place], value)
            if outside:
                left = (*left, metric)
        excursion = _continued(excursion, record.step, left[0] if left else None)
        return (tuple(bands), excursion), left


def require_bands(state: object) -> None:
    """`ValueError` for what is no `State`, such as one with bands of other metrics."""
    if not (isinstance(state, tuple | list) and len(state) == 2):
        raise ValueError(f"a state of the bands has two parts, got {state!r:.80}")
    bands = state[0]
    if not isinstance(bands, tuple | list) or len(bands) != len(WATCHED):
        names = ", ".join(WATCHED)
        raise ValueError(f"a state of the bands has one for each of {names}, got {bands!r:.80}")


def _judged(windows: Ordered, band: Band, value: float) -> tuple[Band, bool]:
    """The band after `value`, and whether that is outside."""
    window, away = band
    if isfinite(value):
        window, values = windows.take(window)
        log = value > 0 and len(values) > 0 and values[0] > 0
        if len(values) < JUDGED or not robust.exceeds(values, value, K, log):
            return (windows.push(window, values, value), 0), False
        windows.keep(window, values)
    return ((EMPTY, 0) if away + 1 == RESTART else (window, away + 1)), True


def _continued(excursion: Excursion | None, step: int, left: str | None) -> Excursion | None:
    if left is not None:
        return (*excursion[:2], 0) if excursion else (step, left, 0)
    if excursion is None:
        return None
    first, metric, inside = excursion
    return None if inside + 1 == CALM else (first, metric, inside + 1)
