"""Incidents with the events they are made of, in memory that does not grow with their length."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastclip.monitor.incidents import Incident, Merging, of_event
from fastclip.monitor.records import Event

FIRST = 5  # events kept of each kind and metric of an incident, beside the one of largest value


class Witness(NamedTuple):
    """An event, and the batch of its record."""

    event: Event
    batch: Any


@dataclass
class Evidence:
    """What one detector said of one metric: how often, at first, and at its worst."""

    count: int
    first: list[Witness]
    worst: Witness

    def witnesses(self) -> list[Witness]:
        known = any(witness.event is self.worst.event for witness in self.first)
        return self.first if known else [*self.first, self.worst]

    def add(self, other: "Evidence") -> None:
        self.count += other.count
        self.first = [*self.first, *other.first][:FIRST]
        self.worst = max(self.worst, other.worst, key=_badness)


@dataclass
class Episode:
    """An incident, and its evidence under kind and metric."""

    incident: Incident
    evidence: dict[tuple[str, str], Evidence] = field(default_factory=dict)

    @property
    def onset(self) -> int:
        return self.incident.first if self.incident.onset is None else self.incident.onset

    def add(self, other: "Episode", both: Incident) -> None:
        self.incident = both
        for key, evidence in other.evidence.items():
            if key in self.evidence:
                self.evidence[key].add(evidence)
            else:
                self.evidence[key] = evidence

    def witnesses(self) -> list[Witness]:
        found = [witness for one in self.evidence.values() for witness in one.witnesses()]
        return sorted(found, key=lambda witness: witness.event.step)


def of_one(event: Event, attempt: int, batch: Any) -> Episode:
    witness = Witness(event, batch)
    evidence = Evidence(1, [witness], witness)
    return Episode(of_event(event, attempt), {(event.kind, event.metric): evidence})


class Episodes:
    """Episodes that are merged one by one, as incidents are."""

    def __init__(self, gap: float) -> None:
        self.found: list[Episode] = []
        self._incidents = Merging(gap)

    def add(self, new: Episode) -> None:
        place = self._incidents.add(new.incident)
        if place == len(self.found):
            self.found.append(new)
        else:
            self.found[place].add(new, self._incidents.found[place])


def _badness(witness: Witness) -> float:
    value = witness.event.value
    return value if math.isfinite(value) else math.inf
