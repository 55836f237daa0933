"""Rows of layers: where their numbers come from, and which records carry them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fastclip.monitor.records import COLUMNS, Event, LayerRow, StepRecord

if TYPE_CHECKING:
    from torch import Tensor


class LayerTable(NamedTuple):
    """Numbers of n layers by column: what a watch or a caller has of them.

    Attributes:
        names: of the layers.
        columns: names of fields of `LayerRow`, and n numbers for each: a tensor ``[n]``, which may
            be on a device, or a sequence, in which None is missing.
    """

    names: tuple[str, ...]
    columns: Mapping[str, "Tensor | Sequence[float | None]"]


Source: TypeAlias = Callable[[], LayerTable]  # of columns on the host


def require_table(table: LayerTable) -> None:
    """Raises `TypeError` or `ValueError` for columns that a `LayerRow` has not, or of a length that
    is not that of the names."""
    for name, column in table.columns.items():
        if name not in COLUMNS:
            raise TypeError(f"a layer has no {name!r}; its columns are {', '.join(COLUMNS)}")
        shape = tuple(column.shape) if hasattr(column, "shape") else (len(column),)
        if shape != (len(table.names),):
            raise ValueError(
                f"the column {name!r} of {len(table.names)} layers has the shape {shape}"
            )


def merged(tables: Iterable[LayerTable]) -> tuple[LayerRow, ...]:
    """One row for each name, in order of appearance; a later table's numbers win."""
    first, *others = tables
    columns = [first.columns.get(column) for column in COLUMNS]
    missing = [None] * len(first.names)
    every = zip(first.names, *(missing if c is None else c for c in columns), strict=True)
    # LayerRow(*one) for each, without calls in Python: 0.2 ms for 2,000 layers, not 0.5
    rows: list[LayerRow] = list(map(tuple.__new__, repeat(LayerRow), every))
    if not others:
        return tuple(rows)
    found = {row.name: row for row in rows}
    for table in others:
        for name, *values in zip(table.names, *table.columns.values(), strict=True):
            row = found.get(name) or LayerRow(name)
            found[name] = row._replace(**dict(zip(table.columns, values, strict=True)))
    return tuple(found.values())


class Carriers:
    """Which records carry rows of layers.

    Every `every`-th does, counted from the first; so does one whose watches gave some. Where a
    record has an event, it carries rows, and the `before` records before it are given theirs
    afterwards; events of one kind and metric bring that about at most once in `every` records, so
    that a flood of them takes no rows from another kind. With `every` 0 none does.
    """

    def __init__(self, every: int, before: int) -> None:
        self._every = every
        self._records = 0
        # By kind and metric: the number of records at its last event with rows; those still barred.
        self._bursts: dict[tuple[str, str], int] = {}
        # Records without rows, and what those would be made of.
        self._recent: deque[tuple[StepRecord, Sequence[Source]]] = deque(maxlen=before)

    def __getstate__(self) -> dict[str, Any]:
        # The records of a copy: its original gives those before them their rows.
        return {**vars(self), "_recent": deque(maxlen=self._recent.maxlen)}

    def counted(self, record: StepRecord, sources: Sequence[Source], always: bool) -> StepRecord:
        """The next record, with rows of layers if it is its turn, or if it `always` has some."""
        self._records += 1
        if self._every and (always or self._records % self._every == 0):
            return with_layers(record, sources)
        return record

    def of_events(
        self, record: StepRecord, sources: Sequence[Source], events: Iterable[Event]
    ) -> StepRecord | None:
        """A record that has events, with rows of layers; None if it is too early for more."""
        if not self._every:
            return None
        oldest = self._records - self._every
        barred = {key: burst for key, burst in self._bursts.items() if burst > oldest}
        keys = {(event.kind, event.metric) for event in events}
        if keys <= barred.keys():
            return None
        # Those that were barred too: kinds that go on together bring rows together, once.
        self._bursts = barred | dict.fromkeys(keys, self._records)
        return with_layers(record, sources)

    def keep(self, record: StepRecord, sources: Sequence[Source]) -> None:
        """Remember a record for the case that one after it has an event."""
        if self._every:
            self._recent.append((record, sources if record.layers is None else ()))

    def amended(self) -> list[StepRecord]:
        """The records before an event, with rows of layers, that had none."""
        found = [with_layers(record, sources) for record, sources in self._recent]
        changed = [new for new, (old, _) in zip(found, self._recent, strict=True) if new is not old]
        self._recent.clear()
        return changed


def with_layers(record: StepRecord, sources: Sequence[Source]) -> StepRecord:
    """The record with rows of layers; itself if it has some, or if there is nothing to make any
    of."""
    if record.layers is not None or not sources:
        return record
    return replace(record, layers=merged(source() for source in sources))
