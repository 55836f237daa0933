"""Series of bounded length that keep their spikes."""

from typing import NamedTuple

BUCKETS = 1200  # per series at most: at two points each, more than a screen has columns


class Point(NamedTuple):
    """A value of a record; `note` says what else is to be told of it."""

    step: int
    attempt: int
    value: float
    note: str = ""


class Thinned:
    """A series in order of arrival: all of it, or the extremes of every `width` values.

    As soon as there are more than `buckets` buckets, neighbours are merged and `width` doubles, so
    a million values take no more memory than a few thousand. Values have to be finite.
    """

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.width = 1
        self.count = 0
        self._limit = buckets
        self._buckets: list[tuple[Point, Point]] = []  # the smallest and the largest value
        self._room = 0  # values that the last bucket still takes
        self._last: Point | None = None

    def add(self, step: int, attempt: int, value: float, note: str = "") -> None:
        self.count += 1
        self._last = point = Point(step, attempt, value, note)
        if self._room:
            self._room -= 1
            low, high = self._buckets[-1]
            if value < low.value:
                self._buckets[-1] = point, high
            elif value > high.value:
                self._buckets[-1] = low, point
            return
        if len(self._buckets) == self._limit:
            self._merge()
        self._buckets.append((point, point))
        self._room = self.width - 1

    def points(self) -> list[Point]:
        """In order of arrival as far as buckets tell it; the last value is always there."""
        found: list[Point] = []
        for low, high in self._buckets:
            found += sorted({low, high}, key=lambda point: (point.attempt, point.step))
        if self._last is not None and self._last not in found[-2:]:
            found.append(self._last)
        return found

    def _merge(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [
            (
                min(one[0], two[0], key=lambda point: point.value),
                max(one[1], two[1], key=lambda point: point.value),
            )
            for one, two in pairs
        ]
        self.width *= 2
