"""Layers by steps in bounded memory: what the heat maps show."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastclip.monitor.records import LayerRow

COLUMNS = 240  # at most; beyond it neighbours are merged
CELLS = 1_000_000  # at most, of each of the two metrics
LAYERS = 5_000  # at most; what comes later is counted


@dataclass
class Column:
    """The layers of one step, or the largest value of each over several.

    `first` and `last` are pairs of attempt and step. A value is NaN where there is none, and
    infinite where the norm was NaN or infinite.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    norms: "array[float]"
    nonfinite: "array[float]"


class Grid:
    """Columns of layers in the order of attempt and step."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}  # the place of each name
        self.left_out: set[int] = set()  # hashes of the names beyond LAYERS
        self._columns: list[Column] = []

    def add(self, step: int, attempt: int, layers: Iterable[LayerRow]) -> None:
        place = (attempt, step)
        column = Column(place, place, array("d"), array("d"))
        for layer in layers:
            row = self._row(layer.name)
            if row is not None:
                _put(column.norms, row, _norm(layer.norm))
                _put(column.nonfinite, row, _share(layer.nonfinite))
        self._columns.append(column)
        while len(self._columns) > max(8, min(COLUMNS, CELLS // max(1, len(self.rows)))):
            ordered = self.columns()
            self._columns = [_merged(ordered[i : i + 2]) for i in range(0, len(ordered), 2)]

    def columns(self) -> list[Column]:
        """One for each step, or for several."""
        found: list[Column] = []
        for column in sorted(self._columns, key=lambda column: column.first):
            if found and found[-1].last >= column.first:
                found[-1] = _merged([found[-1], column])
            else:
                found.append(column)
        return found

    def faulty(self) -> list[str]:
        """Layers that ever had elements that are not finite, or such a norm where nobody counted
        them, in the model's order."""
        rows = {
            row
            for column in self._columns
            for row, norm in enumerate(column.norms)
            if norm == math.inf and not value_at(column.nonfinite, row) <= 0
        }
        rows |= {
            row
            for column in self._columns
            for row, share in enumerate(column.nonfinite)
            if share > 0
        }
        return [name for name, row in self.rows.items() if row in rows]

    def _row(self, name: str) -> int | None:
        if name not in self.rows:
            if len(self.rows) == LAYERS:
                self.left_out.add(hash(name))
                return None
            self.rows[name] = len(self.rows)
        return self.rows[name]


def at_fault(layer: LayerRow) -> bool:
    """Whether a row says that its layer had elements that are not finite, as `Grid.faulty` reads
    it."""
    share = _share(layer.nonfinite)
    return share > 0 or (_norm(layer.norm) == math.inf and not share <= 0)


def value_at(values: "array[float]", row: int) -> float:
    """Of a column, which ends with the last row it has a value for."""
    return values[row] if row < len(values) else math.nan


def _norm(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if math.isfinite(value) else math.inf


def _share(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value


def _put(values: "array[float]", row: int, value: float) -> None:
    values.extend([math.nan] * (row + 1 - len(values)))
    values[row] = value


def _merged(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    one, two = columns
    return Column(
        one.first,
        max(one.last, two.last),
        _largest(one.norms, two.norms),
        _largest(one.nonfinite, two.nonfinite),
    )


def _largest(one: "array[float]", two: "array[float]") -> "array[float]":
    """Of each place, where NaN is no value."""
    short, long = sorted((one, two), key=len)
    found = array("d", long)
    for place, value in enumerate(short):
        if not value <= found[place]:  # larger, or one of the two is NaN
            found[place] = found[place] if math.isnan(value) else value
    return found
