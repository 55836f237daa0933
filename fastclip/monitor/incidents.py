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
    found: list[Incident] = []
    for event in events:
        now = found[-1] if found else None
        begun = event.step - gap if event.onset is None else min(event.onset, event.step - gap)
        if now and begun <= now.last <= event.step:
            found[-1] = _extended(now, event)
        else:
            found.append(
                Incident(
                    *(event.step, event.step, event.onset, event.onset_metric),
                    *(event.level, (event.kind,), 1, event.message),
                )
            )
    return found


def _extended(incident: Incident, event: Event) -> Incident:
    higher = LEVELS.index(event.level) > LEVELS.index(incident.level)
    known = event.kind in incident.kinds
    return incident._replace(
        last=event.step,
        level=event.level if higher else incident.level,
        message=event.message if higher else incident.message,
        kinds=incident.kinds if known else (*incident.kinds, event.kind),
        events=incident.events + 1,
    )
