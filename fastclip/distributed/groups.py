"""Gradients that are spread over process groups by hand: pipeline stages, shards, experts, copies.

At construction the members of each group tell each other the names of their parameters, from which
each works out the same rows. At every step one `all_gather` per group moves what each rank has
measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.roster import Roster, Share, sources, unite
from fastclip.ranks import Contributions, said

SHOWN = 10  # names that an error lists

Counts = Callable[[str, Tensor], bool]
ProcessGroups = dist.ProcessGroup | Sequence[dist.ProcessGroup]


class Together(NamedTuple):
    """What the ranks of all groups have measured, n rows: the same on every rank."""

    names: tuple[str, ...]
    numel: tuple[int, ...]
    table: Tensor  # [n, 5]
    contributions: Contributions


class Groups:
    """The groups of one clipper.

    To build one is a collective of all groups, as `meet` is, whose errors it has.
    """

    def __init__(
        self,
        process_group: Any,
        counts: Any,
        tensors: Sequence[Tensor],
        names: Sequence[str] | None,
        settings: str,
    ) -> None:
        groups = groups_of(process_group)
        self._rank = dist.get_rank()
        self._own, error = Roster((self._rank,), (), {}), None
        try:
            self._own = held(tensors, names, counts)
        except Exception as met:  # raised when the others have been told
            error = met
        self._all, self._meetings = meet(groups, self._own, settings, error)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._places = {name: place for place, name in enumerate(self._own.names)}
        self._rows = {name: row for row, name in enumerate(self._all.names)}
        self._numel = self._all.numel()
        self._sent: dict[torch.device, _Sent] = {}

    def rows(self, names: Sequence[str]) -> list[int]:
        """Where the rows of these gradients of this rank are."""
        return [self._rows[name] for name in names]

    def combine(
        self, names: Sequence[str], table: Tensor, p: float, error: Exception | None = None
    ) -> Together:
        """Together with what the other ranks have measured: the table of all rows.

        `names` and `table`, ``[n, 5]``, are of the gradients that this rank has. A collective; with
        an `error` this rank could not measure, takes part all the same and raises it. Raises
        `RuntimeError` if another rank could not, or if a gradient is new.
        """
        new = [name for name in names if name not in self._places]
        if error is None and new:
            error = RuntimeError(
                f"the gradient {new[0]!r} is of a parameter that was not there, or not trained, "
                "when this GradClipper told other ranks what this one holds: build a new one, on "
                "all ranks"
            )
        if error is not None or not names:
            names, table = (), tables.empty(p, 0, self._device)
        sent = self._sent_to(table.device)
        every = self._placed(names, table, p)
        failed = None if error is None else self._rank
        for meeting, index in zip(self._meetings, sent.sources, strict=True):
            header = combine.pack(table[:0], (), meeting.checksum, failed)
            padding = _nothing(p, meeting.places - len(every), table.device)
            gathered = combine.gather(torch.cat([header, every, padding]), meeting.group)
            gathered.refuse_different("the ranks of a process group take a step of one GradClipper")
            failed = _first_failed(gathered) if failed is None else failed
            rows = torch.cat([gathered.tables, gathered.flags[:, :, None]], 2).flatten(0, 1)
            every = torch.cat([rows, _nothing(p, 1, table.device)]).index_select(0, index)
        if error is not None:
            raise error
        if failed is not None:
            raise RuntimeError(
                f"rank {failed} could not measure its gradients, and raises the error itself. No "
                "gradient has been changed"
            )
        every = every.view(len(self._all.ranks), len(self._all.names), -1)
        parts = every[:, :, : tables.COLUMNS]
        present = every[:, :, tables.COLUMNS].amax(0) > 0
        return Together(
            self._all.names,
            self._numel,
            combine.combine(parts, sent.counted, p),
            Contributions(self._all.ranks, parts, present),
        )

    def _placed(self, names: Sequence[str], table: Tensor, p: float) -> Tensor:
        """The rows of this rank's roster, with flags: ``[size, 6]``."""
        rows = torch.cat([table, table.new_full((len(table), 1), combine.PRESENT)], 1)
        if tuple(names) == self._own.names:
            return rows
        places = torch.tensor([self._places[name] for name in names], device="cpu")
        places = places.to(table.device, torch.int64)
        return _nothing(p, self._own.size, table.device).index_copy(0, places, rows)

    def _sent_to(self, device: torch.device) -> "_Sent":
        if device not in self._sent:
            counted = torch.tensor(self._all.weights(), dtype=torch.bool, device="cpu")
            indices = [
                torch.tensor(meeting.sources, dtype=torch.int64, device="cpu")
                for meeting in self._meetings
            ]
            self._sent[device] = _Sent(counted.to(device), [each.to(device) for each in indices])
        return self._sent[device]


class _Sent(NamedTuple):
    """What steps need on a device."""

    counted: Tensor  # [ranks, names] bool
    sources: list[Tensor]  # of each meeting


def _nothing(p: float, n: int, device: torch.device) -> Tensor:
    """Rows without elements, with their flags, ``[n, 6]``."""
    rows = tables.empty(p, n, device)
    return torch.cat([rows, rows.new_zeros(n, 1)], 1)


def _first_failed(gathered: combine.Gathered) -> int | None:
    """The lowest rank that could not measure, of this group or heard of by one of its members."""
    failed = [int(each) - 1 for each in gathered.header[:, combine.FAILED].tolist() if each]
    return min(failed, default=None)


class Card(NamedTuple):
    """What a member tells the others of a group."""

    rank: int
    roster: Roster
    settings: str  # on which all have to agree
    error: str | None  # why it cannot go on


class Meeting(NamedTuple):
    """What came of a group's exchange, for its steps."""

    group: dist.ProcessGroup
    places: int  # of the largest contributions of a member
    sources: list[int]  # see `roster.sources`; what there is none of is after all contributions
    checksum: int  # of what the ranks hold together


def groups_of(process_group: Any) -> list[dist.ProcessGroup]:
    """One group or several, as a list."""
    if isinstance(process_group, Sequence) and not isinstance(process_group, str):
        groups = [*process_group]
    else:
        groups = [process_group]
    for group in groups:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "process_group holds a group that this process is not a member of: "
                "torch.distributed.new_group gives the group itself to its members only"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup or a sequence of them, "
                f"got {type(group).__name__}"
            )
    if len(set(map(id, groups))) < len(groups):
        raise ValueError(f"a group comes twice among the {len(groups)} of process_group")
    return groups


def held(tensors: Sequence[Tensor], names: Sequence[str] | None, counts: Counts | None) -> Roster:
    """The roster of this rank alone: its parameters that require a gradient or have one."""
    if names is None and tensors:
        raise ValueError(
            "process_group combines parameters by their names, and these have none: pass the "
            "module, or (name, Tensor) pairs with the names that they have in the whole model"
        )
    rank = dist.get_rank()
    shares: dict[tuple[int, str], Share] = {}
    for name, tensor in zip(names or (), tensors, strict=True):
        if not takes_part(tensor):
            continue
        if (rank, name) in shares:
            raise ValueError(
                f"the name {name!r} comes more than once in parameters, and process_group combines "
                "them by their names"
            )
        shares[rank, name] = Share(tensor.numel(), _counts(name, tensor, counts))
    return Roster((rank,), tuple(name for _, name in shares), shares)


def takes_part(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _counts(name: str, parameter: Tensor, counts: Counts | None) -> bool:
    answer: Any = True if counts is None else counts(name, parameter)
    if not isinstance(answer, bool):
        raise TypeError(f"counts must return True or False, got {answer!r:.80} for {name!r}")
    return answer


def meet(
    groups: Sequence[dist.ProcessGroup],
    mine: Roster,
    settings: str,
    error: Exception | None = None,
) -> tuple[Roster, list[Meeting]]:
    """Exchange rosters over each group in turn: the rows of all, and what steps need of each group.

    A collective, in which a rank takes part to the end whatever is wrong, with it or with another
    rank. Raises its own `error`; else `RuntimeError` with that of another, or `ValueError` where
    settings differ or a name counts nowhere.
    """
    meetings = []
    for group in groups:
        cards = _exchanged(
            group, Card(dist.get_rank(), mine, settings, None if error is None else _told(error))
        )
        error = error or _disagreement(cards)
        members = [card.roster for card in cards]
        mine = unite(members)
        places = max(member.size for member in members)
        checksum = combine.checksum_of(mine.names)
        meetings.append(Meeting(group, places, sources(members, mine), checksum))
    error = error or _of_uncounted(mine)
    if error is not None:
        raise error
    return mine, meetings


def _exchanged(group: dist.ProcessGroup, card: Card) -> list[Card]:
    cards: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(cards, card, group=group)
    except RuntimeError as error:  # a rank has died, or never came
        ranks = said(dist.get_process_group_ranks(group))
        raise RuntimeError(
            f"exchanging the names of parameters between {ranks} failed: {error}"
        ) from error
    return cards


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _disagreement(cards: Sequence[Card]) -> Exception | None:
    for card in cards:
        if card.error is not None:
            return RuntimeError(f"rank {card.rank} could not build its GradClipper: {card.error}")
    first = cards[0]
    for card in cards:
        if card.settings != first.settings:
            return ValueError(
                "the GradClippers of a process group must be alike: that of rank "
                f"{first.rank} has {first.settings}, that of rank {card.rank} {card.settings}"
            )
    return None


def _of_uncounted(roster: Roster) -> Exception | None:
    names = roster.uncounted()
    if not names:
        return None
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(map(repr, names[:SHOWN]))
    return ValueError(
        f"counts is False on every rank that holds {shown}{more} "
        f"({said(roster.holders(names[0]))} of the first): its gradient would be clipped by a norm "
        "that it is not part of"
    )
