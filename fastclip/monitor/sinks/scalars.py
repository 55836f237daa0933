"""What the clients are given: a record as flat names and numbers, an event as one line."""

from collections import Counter
from collections.abc import Callable, Iterable

from fastclip.monitor.records import COLUMNS, METRICS, Event, StepRecord

_FIELDS = (*METRICS, "clipped", "skipped", "attempt")


def _same(name: str) -> str:
    return name


def scalars(
    record: StepRecord, prefix: str, layers: bool, rename: Callable[[str], str] = _same
) -> dict[str, float]:
    """The numbers of a record, by ``prefix/FIELD`` and ``prefix/layers/NAME/COLUMN``.

    `clipped` and `skipped` are 0 or 1. What is None is left out, and so are `step`, which clients
    take apart, and `batch`. NaN and infinities are as they are. `layers` says whether rows of
    layers are wanted, `rename` what NAME is made of the name of a layer.
    """
    values = {
        f"{prefix}/{name}": float(value)
        for name in _FIELDS
        if (value := getattr(record, name)) is not None
    }
    for row in record.layers or () if layers else ():
        start = f"{prefix}/layers/{rename(row.name)}"
        for column in COLUMNS:
            if (value := getattr(row, column)) is not None:
                values[f"{start}/{column}"] = float(value)
    return values


def counts(so_far: "Counter[str]", events: Iterable[Event], prefix: str) -> dict[str, float]:
    """Adds events to the counts per level; those that grew, by ``prefix/events/LEVEL``."""
    levels = [event.level for event in events]
    so_far.update(levels)
    return {f"{prefix}/events/{level}": float(so_far[level]) for level in sorted(set(levels))}


def sentence(event: Event) -> str:
    """An event in one line, without a character that a terminal would obey."""
    onset = "" if event.onset in (None, event.step) else f" (onset {event.onset})"
    what = f"step {event.step}{onset}: {event.level}: {event.kind}, {event.message or event.metric}"
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in what
    )
