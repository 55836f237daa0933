"""Which ranks contribute to which rows: what the members of a process group tell each other once.

Plain bookkeeping over names; what moves at every step is in `groups`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Share(NamedTuple):
    """What one rank holds of one row."""

    numel: int
    counts: bool  # False: a copy, which another rank's share stands for


@dataclass(frozen=True)
class Roster:
    """Contributors and rows: a rank's own at first, after a group those of all its members.

    A step's contributions are float64 ``[ranks, names, columns]`` in this order; where `shares`, by
    rank and name, has none, a rank holds nothing of a row. Contributor ``-1 - r`` is the mesh of
    DTensors whose lowest rank is r: its share is what its ranks have combined.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    shares: Mapping[tuple[int, str], Share]

    @property
    def size(self) -> int:
        """Places in a step's contributions."""
        return len(self.ranks) * len(self.names)

    def numel(self) -> tuple[int, ...]:
        """Of each row, over the shares that count."""
        sums = dict.fromkeys(self.names, 0)
        for (_, name), share in self.shares.items():
            sums[name] += share.numel * share.counts
        return tuple(sums.values())

    def weights(self) -> list[list[bool]]:
        """``[ranks, names]``: whose shares count."""
        none = Share(0, False)
        return [
            [self.shares.get((rank, name), none).counts for name in self.names]
            for rank in self.ranks
        ]

    def signs(self) -> list[list[int]]:
        """``[ranks, names]``: 1 for shares that count, -1 for copies of what does; 0 for none, and
        for ranks whose share is a mesh's."""
        none = Share(0, False)
        shares = [
            [self.shares.get((rank, name), none) for name in self.names] for rank in self.ranks
        ]
        return [[1 if each.counts else -(each.numel > 0) for each in row] for row in shares]

    def holders(self, name: str) -> list[int]:
        return [rank for rank in self.ranks if (rank, name) in self.shares]

    def uncounted(self) -> list[str]:
        """The names that no rank counts."""
        counted = {name for (_, name), share in self.shares.items() if share.counts}
        return [name for name in self.names if name not in counted]


def unite(members: Sequence[Roster]) -> Roster:
    """The roster of all that the members of a group know of, in order of first appearance.

    A rank's share comes through several members if they have met in an earlier group; it is one
    share all the same, and counts if one of them says so.
    """
    shares: dict[tuple[int, str], Share] = {}
    for member in members:
        for key, share in member.shares.items():
            known = shares.get(key, share)
            shares[key] = share._replace(counts=share.counts or known.counts)
    ranks = dict.fromkeys(rank for member in members for rank in member.ranks)
    names = dict.fromkeys(name for member in members for name in member.names)
    return Roster(tuple(ranks), tuple(names), shares)


def sources(members: Sequence[Roster], united: Roster) -> list[int]:
    """For each place of `united`, in order, where its numbers are among those of the members, one
    member after the other, each padded to the places of the largest; after all of them where there
    are none.
    """
    largest = max(member.size for member in members)
    nowhere = len(members) * largest
    found: dict[tuple[int, str], int] = {}
    for number, member in enumerate(members):
        keys = [(rank, name) for rank in member.ranks for name in member.names]
        for place, key in enumerate(keys, number * largest):
            if key in member.shares:
                found.setdefault(key, place)
    return [found.get((rank, name), nowhere) for rank in united.ranks for name in united.names]
