"""Incidents: what a person would call one thing of what several detectors say again and again."""

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from fastclip.monitor.records import LEVELS, Event, Level


class Incident(NamedTuple):
    """Events close together, and what matters of them.

    `first` and `last` are steps, `onset` and `onset_metric` those of the first event, `level` the
    highest, `kinds` in order of appearance; `message` is that of the first event of the highest
    level. All events are of one `attempt`.
    """

    first: int
    last: int
    onset: int | None
    onset_metric: str | None
    level: Level
    kinds: tuple[str, ...]
    events: int
    message: str
    attempt: int = 0


def incidents(
    events: Iterable[Event], gap: float, attempts: Iterable[int] | None = None
) -> list[Incident]:
    """Merge events, in the order in which a Monitor gives them; `attempts` has the one of each.

    One belongs to the incident before it if that was going on at its onset, or ended at most `gap`
    steps before it, in the same attempt: what a rollback did not prevent happened again.
    """
    return merged(map(of_event, events, repeat(0) if attempts is None else attempts), gap)


def merged(parts: Iterable[Incident], gap: float) -> list[Incident]:
    """Merge incidents as events are merged."""
    found: list[Incident] = []
    for new in parts:
        if found and belongs(new, found[-1], gap):
            found[-1] = joined(found[-1], new)
        else:
            found.append(new)
    return found


def of_event(event: Event, attempt: int) -> Incident:
    """The incident of one event alone."""
    return Incident(
        *(event.step, event.step, event.onset, event.onset_metric),
        *(event.level, (event.kind,), 1, event.message),
        attempt,
    )


def belongs(new: Incident, before: Incident, gap: float) -> bool:
    """Whether `new` is part of the incident before it.

    Merging with a small gap first, and the result with a larger one, gives what the larger one
    gives at once.
    """
    begun = new.first - gap if new.onset is None else min(new.onset, new.first - gap)
    return new.attempt == before.attempt and begun <= before.last <= new.first


def joined(before: Incident, new: Incident) -> Incident:
    higher = LEVELS.index(new.level) > LEVELS.index(before.level)
    return before._replace(
        last=new.last,
        level=new.level if higher else before.level,
        message=new.message if higher else before.message,
        kinds=(*before.kinds, *(kind for kind in new.kinds if kind not in before.kinds)),
        events=before.events + new.events,
    )
