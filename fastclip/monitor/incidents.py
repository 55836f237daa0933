"""Incidents: what a person would call one thing of what several detectors say again and again."""

from collections.abc import Iterable
from typing import NamedTuple

from fastclip.monitor.records import LEVELS, Event, Level


class Incident(NamedTuple):
    """Events close together, and what matters of them.

    `first` and `last` are steps, `onset` and `onset_metric` those of the first event, `level` the
    highest, `kinds` in order of appearance; `message` is that of the first event of the highest
    level.
    """

    first: int
    last: int
    onset: int | None
    onset_metric: str | None
    level: Level
    kinds: tuple[str, ...]
    events: int
    message: str


def incidents(events: Iterable[Event], gap: float) -> list[Incident]:
    """Merge events, in the order in which a Monitor gives them.

    One belongs to the incident before it if that was going on at its onset, or ended at most `gap`
    steps before it.
    """
    return merged(map(_of, events), gap)


def merged(parts: Iterable[Incident], gap: float) -> list[Incident]:
    """Merge incidents as events are merged. Those of events and a smaller gap give what the events
    themselves give with this one: what belongs together there does so here."""
    found: list[Incident] = []
    for part in parts:
        begun = part.first - gap if part.onset is None else min(part.onset, part.first - gap)
        if found and begun <= found[-1].last <= part.first:
            found[-1] = _joined(found[-1], part)
        else:
            found.append(part)
    return found


def _of(event: Event) -> Incident:
    return Incident(
        *(event.step, event.step, event.onset, event.onset_metric),
        *(event.level, (event.kind,), 1, event.message),
    )


def _joined(incident: Incident, later: Incident) -> Incident:
    higher = LEVELS.index(later.level) > LEVELS.index(incident.level)
    new = tuple(kind for kind in later.kinds if kind not in incident.kinds)
    return incident._replace(
        last=later.last,
        level=later.level if higher else incident.level,
        message=later.message if higher else incident.message,
        kinds=incident.kinds + new,
        events=incident.events + later.events,
    )
