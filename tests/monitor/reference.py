"""The detectors and bands once more, by definition, with all values at hand and no hurry."""

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import median

from fastclip.monitor import StepRecord

Found = list[tuple[int, float, float]]  # step, value, baseline


def recorded(records: Sequence[StepRecord], metric: str = "loss") -> list[tuple[int, float]]:
    pairs = [(record.step, getattr(record, metric)) for record in records]
    return [(step, x) for step, x in pairs if x is not None and math.isfinite(x)]


def spike(values: list[tuple[int, float]], ratio: float, window: int) -> Found:
    found = []
    for i, (step, x) in enumerate(values[window:], window):
        mean = float(sum(Fraction(v) for _, v in values[i - window : i]) / window)
        if mean > 0 and x >= ratio * mean:
            found.append((step, x, mean))
    return found


def outlier(before: list[float], x: float, k: float, log: bool) -> bool:
    if log:
        before, x = [math.log(v) for v in before], math.log(x)
    middle = median(before)
    mad = median(abs(v - middle) for v in before)
    floor = 1e-3 if log else 1e-3 * abs(middle)
    return x - middle > max(k * 1.4826 * mad, k * floor)


def robust_spike(values: list[tuple[int, float]], k: float, window: int, log: bool) -> Found:
    if log:
        values = [(step, x) for step, x in values if x > 0]
    found = []
    for i, (step, x) in enumerate(values[window:], window):
        before = [v for _, v in values[i - window : i]]
        if outlier(before, x, k, log):
            middle = math.exp(median(map(math.log, before))) if log else median(before)
            found.append((step, x, middle))
    return found


def sustained(
    values: list[tuple[int, float]], window: int, low: float, high: float, baseline: int
) -> Found:
    found = []
    for i in range(window + baseline, len(values) + 1):
        recent = [v for _, v in values[i - window : i]]
        middle = median(v for _, v in values[i - window - baseline : i - window])
        if middle > 0 and min(recent) > low * middle and max(recent) > high * middle:
            found.append((values[i - 1][0], recent[-1], middle))
    return found


def drift(values: list[tuple[int, float]], window: int, ratio: float) -> Found:
    found = []
    medians = [
        (values[i - 1][0], median(v for _, v in values[i - window : i]))
        for i in range(window, len(values) + 1)
    ]
    for i, (step, middle) in enumerate(medians[1:], 1):
        best = min(m for _, m in medians[:i])
        if best > 0 and middle > ratio * best:
            found.append((step, middle, best))
    return found


def onsets(rows: Sequence[dict[str, float]]) -> list[tuple[int, str] | None]:
    """Per record (its metrics, in the order of the bands) the excursion it is in."""
    inside: dict[str, list[float]] = {}
    outside: dict[str, int] = {}
    excursion: tuple[int, str] | None = None
    calm = 0
    found = []
    for step, row in enumerate(rows):
        left = []
        for metric, x in row.items():
            band = inside.setdefault(metric, [])
            last = band[-100:]
            bad = not math.isfinite(x) or (
                len(band) >= 20 and outlier(last, x, 7.0, log=min([*last, x]) > 0)
            )
            if bad:
                left.append(metric)
                outside[metric] = outside.get(metric, 0) + 1
                if outside[metric] == 100:
                    inside[metric], outside[metric] = [], 0
            else:
                band.append(x)
                outside[metric] = 0
        calm = 0 if left else calm + 1
        if left and excursion is None:
            excursion = (step, left[0])
        elif calm == 10:
            excursion = None
        found.append(excursion)
    return found
