"""Sliding windows over the last values of a metric.

A window is plain immutable data, because it is part of a detector's state: states are compared,
pickled, and kept for the last 2,000 steps, to go back to. It is a queue in blocks that windows
share, so the one after it costs some 200 bytes, and making it is independent of its size.

What is asked of a window (its median, its mean) would take a pass over it. `Ordered` and `Summed`
therefore remember, for the window they returned last, its values in order or their sum, and carry
that over to the next one; for any other window they work it out anew, with the same result. A new
value then costs two binary searches and two moves inside a list: 1.0 us in a window of 100 values
and 3.1 us in one of 10,000, where sorted tuples, copied whole, take 1.7 us and 86 us.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain
from typing import Generic, TypeVar

BLOCK = 16

# Full blocks, oldest first; the newest values; how many of the first block have left.
Window = tuple[tuple[tuple[float, ...], ...], tuple[float, ...], int]
EMPTY: Window = ((), (), 0)

Derived = TypeVar("Derived")


def values_of(window: Window) -> list[float]:
    """The values, oldest first."""
    blocks, tail, gone = window
    return [*chain.from_iterable(blocks), *tail][gone:]


def window_of(values: Iterable[float]) -> Window:
    """A window of these values, oldest first."""
    values = tuple(values)
    full = len(values) // BLOCK * BLOCK
    blocks = tuple(values[start : start + BLOCK] for start in range(0, full, BLOCK))
    return blocks, values[full:], 0


def oldest(window: Window) -> float:
    """The value that leaves next, of a window that has one."""
    blocks, tail, gone = window
    return blocks[0][gone] if blocks else tail[gone]


class _Sliding(Generic[Derived]):
    """Windows of at most `size` values, each with what is derived from them.

    `take` gives a window's derived data away; who has it judges by it and then puts it back, with
    `push` or `keep`. So it has one owner at a time, and several threads may use one detector.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: list[tuple[Window, Derived]] = []  # one, or none while somebody has it

    def take(self, window: Window) -> tuple[Window, Derived]:
        """The window, cut to `size`, and what is derived from it."""
        try:
            found = self._last.pop()  # one atomic step
        except IndexError:
            pass
        else:
            if found[0] is window:
                return found
        values = values_of(window)
        if len(values) > self.size:  # of a state saved with a larger size
            values = values[-self.size :]
            window = window_of(values)
        return window, self._derive(values)

    def keep(self, window: Window, derived: Derived) -> Window:
        self._last = [(window, derived)]
        return window

    def _moved_on(self, window: Window, derived: Derived, value: float, full: bool) -> Window:
        """`window` with `value`, if it is `full` without its oldest; `derived` is that of it."""
        blocks, tail, gone = window
        tail = (*tail, value)
        if len(tail) == BLOCK:
            blocks, tail = (*blocks, tail), ()
        if full:
            gone += 1
            if gone == BLOCK:
                blocks, gone = blocks[1:], 0
        window = blocks, tail, gone
        self._last = [(window, derived)]
        return window

    def _derive(self, values: list[float]) -> Derived:
        raise NotImplementedError


class Ordered(_Sliding[list[float]]):
    """Windows with their values in ascending order."""

    def push(self, window: Window, values: list[float], value: float) -> Window:
        """The window after `value`; `values` become those of it."""
        value = (
            float(value) or 0.0
        )  # -0.0 becomes 0.0: as equals, either might be taken out for the other
        full = len(values) == self.size
        if full:
            del values[bisect_left(values, oldest(window))]
        insort(values, value)
        return self._moved_on(window, values, value, full)

    def _derive(self, values: list[float]) -> list[float]:
        return sorted(values)


class Total:
    """The sum of some values, exactly: a float is a whole multiple of 2**-1074."""

    __slots__ = ("count", "units")

    def __init__(self, units: int = 0, count: int = 0) -> None:
        self.units = units
        self.count = count

    def mean(self) -> float:
        return self.units / (self.count << 1074)


def _units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())


class Summed(_Sliding[Total]):
    """Windows with the sum of their values, free of rounding: what passed through leaves no trace.

    A running sum of floats would keep the rounding error of the largest value ever seen.
    """

    def push(self, window: Window, total: Total, value: float) -> Window:
        """The window after `value`; `total` becomes that of it."""
        full = total.count == self.size
        total.units += _units(value)
        if full:
            total.units -= _units(oldest(window))
        else:
            total.count += 1
        return self._moved_on(window, total, value, full)

    def _derive(self, values: list[float]) -> Total:
        return Total(sum(map(_units, values)), len(values))
