"""Median and median absolute deviation (MAD) of values in ascending order."""

import math
from collections.abc import Callable, Sequence

SPREAD = 1.4826  # the standard deviation of a normal distribution over its MAD
FLOOR = 1e-3  # the least spread, relative to the median; no smaller deviation is a signal


def median(values: Sequence[float]) -> float:
    """Of at least one value; of an even number the mean of the two in the middle."""
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    middle = (values[half - 1] + values[half]) / 2
    return middle if math.isfinite(middle) else values[half - 1] / 2 + values[half] / 2


def center(values: Sequence[float], log: bool) -> float:
    """The median, or the median of the logarithms."""
    if not log:
        return median(values)
    half = len(values) // 2
    upper = math.log(values[half])
    return upper if len(values) % 2 else (math.log(values[half - 1]) + upper) / 2


def mad(values: Sequence[float], middle: float, scale: Callable[[float], float] = float) -> float:
    """The median of ``abs(scale(value) - middle)``, for an increasing `scale`.

    The values nearest to `middle` are neighbours: a binary search finds where the nearer half
    starts, and the largest deviation in it is at one of its ends.
    """
    n = len(values)
    half = n // 2 + 1
    low, high = 0, n - half
    while low < high:
        start = (low + high) // 2
        if middle - scale(values[start]) > scale(values[start + half]) - middle:
            low = start + 1
        else:
            high = start
    left, right = middle - scale(values[low]), scale(values[low + half - 1]) - middle
    if n % 2:
        return max(left, right)
    if left >= right:
        second = max(middle - scale(values[low + 1]), right)
    else:
        second = max(left, scale(values[low + half - 2]) - middle)
    return (max(left, right) + second) / 2


def exceeds(values: Sequence[float], value: float, k: float, log: bool = False) -> bool:
    """Whether `value` is more than k > 0 spreads above the median of `values`, in logarithms if
    `log`.

    The spread is 1.4826 * MAD, and at least 1e-3 of the median's magnitude (in logarithms 1e-3).
    """
    if value <= values[(len(values) - 1) // 2]:  # not above the median, as every other value
        return False
    middle = center(values, log)
    quarter = len(values) // 4
    low, high = values[quarter], values[-1 - quarter]
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    above = value - middle
    # Half of the values are at least as far from the median as the nearer of these two, so the MAD
    # is no less: that settles all but outliers without a search.
    if above <= k * SPREAD * min(middle - low, high - middle):
        return False
    floor = FLOOR if log else FLOOR * abs(middle)
    scale: Callable[[float], float] = math.log if log else float
    return above > k * floor and above > k * SPREAD * mad(values, middle, scale)
