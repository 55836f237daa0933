"""A fixed cost and a slope."""

from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """``fixed + slope * x``; `off` is its largest relative error at a point."""

    fixed: float
    slope: float
    off: float


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line with the least sum of squared relative errors.

    Relative, because costs span orders of magnitude: the largest would decide alone.
    """
    rows = [(1 / y**2, x, y) for x, y in zip(xs, ys, strict=True)]
    total = sum(weight for weight, _, _ in rows)
    x_mean = sum(weight * x for weight, x, _ in rows) / total
    y_mean = sum(weight * y for weight, _, y in rows) / total
    along = sum(weight * (x - x_mean) ** 2 for weight, x, _ in rows)
    if along == 0:
        raise ValueError(f"a line needs two different places, got {sorted(set(xs))}")
    slope = sum(weight * (x - x_mean) * (y - y_mean) for weight, x, y in rows) / along
    fixed = y_mean - slope * x_mean
    return Line(fixed, slope, max(abs(fixed + slope * x - y) / y for _, x, y in rows))
