"""Incidents: what a person would call one thing of what several detectors say again and again."""

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from fastclip.monitor.detectors import ClipRate
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
    Events of `ClipRate` are incidents of their own, beside those of all other kinds: a threshold
    that is too low clips for as long as it stands, and everything would be one with it.
    """
    return merged(map(of_event, events, repeat(0) if attempts is None else attempts), gap)


def merged(parts: Iterable[Incident], gap: float) -> list[Incident]:
    """Merge incidents as events are merged."""
    merging = Merging(gap)
    for new in parts:
        merging.add(new)
    return merging.found


class Merging:
    """Incidents that are merged one by one, `found` in the order of their first events.

    Two can be going on at a time: one of clip rates, and one of other kinds.
    """

    def __init__(self, gap: float) -> None:
        self.found: list[Incident] = []
        self._gap = gap
        self._newest: dict[bool, int] = {}  # by whether it is of clip rates: the place in `found`

    def add(self, new: Incident) -> int:
        """Merge one; its place in `found`."""
        kind = of_clip_rates(new)
        place = self._newest.get(kind)
        if place is not None and _belongs(new, self.found[place], self._gap):
            self.found[place] = _joined(self.found[place], new)
        else:
            place = self._newest[kind] = len(self.found)
            self.found.append(new)
        return place


def of_clip_rates(incident: Incident) -> bool:
    return incident.kinds == (ClipRate.kind,)


def of_event(event: Event, attempt: int) -> Incident:
    """The incident of one event alone."""
    return Incident(
        *(event.step, event.step, event.onset, event.onset_metric),
        *(event.level, (event.kind,), 1, event.message),
        attempt,
    )


def _belongs(new: Incident, before: Incident, gap: float) -> bool:
    """Whether `new` is part of the incident of its sort before it.

    Merging with a small gap first, and the result with a larger one, gives what the larger one
    gives at once.
    """
    begun = new.first - gap if new.onset is None else min(new.onset, new.first - gap)
    return new.attempt == before.attempt and begun <= before.last <= new.first


def _joined(before: Incident, new: Incident) -> Incident:
    higher = LEVELS.index(new.level) > LEVELS.index(before.level)
    return before._replace(
        last=new.last,
        level=new.level if higher else before.level,
        message=new.message if higher else before.message,
        kinds=(*before.kinds, *(kind for kind in new.kinds if kind not in before.kinds)),
        events=before.events + new.events,
    )
