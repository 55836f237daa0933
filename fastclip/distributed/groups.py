"""Gradients that are spread over process groups by hand: pipeline stages, shards, experts, copies.

At construction the members of each group tell each other the names of their parameters, from which
each works out the same rows. At every step one `all_gather` per group moves what each rank has
measured.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.roster import Roster, Share, sources, unite
from fastclip.gradients import Gradients
from fastclip.ranks import Contributions, said
from fastclip.reading import Reading

SHOWN = 10  # names that an error lists

SAME = "the ranks of a process group measure the gradients of one GradClipper at a time"

Counts = Callable[[str, Tensor], bool]
ProcessGroups = dist.ProcessGroup | Sequence[dist.ProcessGroup]


class Groups:
    """The groups of one clipper, whose parameters are `tensors` with `names`, and norms of order p.

    To build one is a collective of all groups, as `meet` is, whose errors it has. On `settings`, in
    words, all ranks have to agree.
    """

    def __init__(
        self,
        process_group: Any,
        counts: Any,
        tensors: Sequence[Tensor],
        names: Sequence[str] | None,
        p: float,
        settings: str,
    ) -> None:
        groups = groups_of(process_group)
        own, error = Roster((dist.get_rank(),), (), {}), None
        try:
            own = held(tensors, names, counts)
        except Exception as met:  # raised when the others have been told
            error = met
        mine = Card(dist.get_rank(), own, settings, tables.result_dtype(tensors))
        self._all, self._dtype, self._meetings = meet(groups, mine, error)
        self._own, self._p = own, p
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._places = {name: place for place, name in enumerate(own.names)}
        self._rows = {name: row for row, name in enumerate(self._all.names)}
        self._numel = self._all.numel()
        self._sent: dict[torch.device, _Sent] = {}
        self._took_part = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of all rows."""
        return self._all.names

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Around a step: what goes wrong on this rank alone, before it has taken part in the
        collectives, does not leave the others waiting there; they raise `RuntimeError`."""
        self._took_part = False
        try:
            yield
        except Exception:
            if not self._took_part:
                self._exchange(self._placed((), self._no_rows()), dist.get_rank() + 1)
            raise

    def read(self, found: Gradients, table: Tensor) -> Reading:
        """`found`, whose table is ``[n, 5]``, together with what the other ranks have measured.

        A collective, to be called within `attended`. Raises `RuntimeError` if another rank could
        not measure, or if on any rank a gradient is new.
        """
        names, trouble = found.names, 0
        if not names:
            table = self._no_rows()
        elif not self._places.keys() >= set(names):
            names, table, trouble = (), table[:0], -1 - dist.get_rank()
        every, trouble = self._exchange(self._placed(names, table), trouble)
        if trouble:
            raise RuntimeError(self._said(trouble, found))
        every = every.view(len(self._all.ranks), len(self._all.names), -1)
        parts = every[:, :, : tables.COLUMNS]
        present = every[:, :, tables.COLUMNS].amax(0) > 0
        return Reading(
            found,
            self._all.names,
            self._numel,
            combine.combine(parts, self._sent_to(table.device).counted, self._p),
            self._dtype,
            Contributions(self._all.ranks, parts, present),
            [self._rows[name] for name in names],
        )

    def _exchange(self, every: Tensor, trouble: int) -> tuple[Tensor, int]:
        """This rank's contributions to those of all, ``[ranks * names, 6]``; and what troubles a
        rank, if not this one then another: one over its number if it could not measure, minus that
        if it has a new gradient, 0 if all is well.
        """
        self._took_part = True
        for meeting, index in zip(self._meetings, self._sent_to(every.device).sources, strict=True):
            header = every.new_zeros(combine.HEADER, tables.COLUMNS + 1)
            header[combine.FAILED, tables.COLUMNS] = trouble
            header[combine.CHECKSUM, tables.COLUMNS] = meeting.checksum
            padding = self._nothing(meeting.places - len(every), every.device)
            gathered = combine.gather(torch.cat([header, every, padding]), meeting.group)
            gathered.refuse_different(SAME)
            heard = map(int, gathered.header[:, combine.FAILED].tolist())
            trouble = trouble or next(filter(None, heard), 0)
            rows = torch.cat([gathered.tables, gathered.flags[:, :, None]], 2).flatten(0, 1)
            every = torch.cat([rows, self._nothing(1, every.device)]).index_select(0, index)
        return every, trouble

    def _said(self, trouble: int, found: Gradients) -> str:
        rank = abs(trouble) - 1
        if trouble > 0:
            return (
                f"rank {rank} could not measure its gradients, and raises the error itself. No "
                "gradient has been changed"
            )
        which = "gradients"
        if rank == dist.get_rank():
            which = f"the gradient {next(n for n in found.names if n not in self._places)!r}"
        return (
            f"rank {rank} has {which} of parameters that were not there, or not trained, when the "
            "ranks told each other what they hold: build a new GradClipper, on all ranks. No "
            "gradient has been changed"
        )

    def _placed(self, names: Sequence[str], table: Tensor) -> Tensor:
        """The rows of this rank's roster, with flags: ``[size, 6]``."""
        rows = torch.cat([table, table.new_full((len(table), 1), combine.PRESENT)], 1)
        if tuple(names) == self._own.names:
            return rows
        places = torch.tensor([self._places[name] for name in names], device="cpu")
        places = places.to(table.device, torch.int64)
        return self._nothing(self._own.size, table.device).index_copy(0, places, rows)

    def _no_rows(self) -> Tensor:
        return tables.empty(self._p, 0, self._device)

    def _nothing(self, n: int, device: torch.device) -> Tensor:
        """Rows without elements, with their flags, ``[n, 6]``."""
        rows = tables.empty(self._p, n, device)
        return torch.cat([rows, rows.new_zeros(n, 1)], 1)

    def _sent_to(self, device: torch.device) -> "_Sent":
        if device not in self._sent:
            counted = torch.tensor(self._all.weights(), dtype=torch.bool, device="cpu")
            indices = [
                torch.tensor(meeting.sources, dtype=torch.int64, device="cpu")
                for meeting in self._meetings
            ]
            self._sent[device] = _Sent(counted.to(device), [each.to(device) for each in indices])
        return self._sent[device]

    def __repr__(self) -> str:
        return said(self._all.ranks)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a GradClipper with a process_group can be neither pickled nor copied: the group is of "
            "this process. Build a new one, and give it the state_dict of this one"
        )


class _Sent(NamedTuple):
    """What steps need on a device."""

    counted: Tensor  # [ranks, names] bool
    sources: list[Tensor]  # of each meeting


class Card(NamedTuple):
    """What a member tells the others of a group."""

    rank: int
    roster: Roster
    settings: str  # on which all have to agree
    dtype: torch.dtype  # of the norms of its gradients
    error: str | None = None  # why it cannot go on


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
    groups: Sequence[dist.ProcessGroup], mine: Card, error: Exception | None = None
) -> tuple[Roster, torch.dtype, list[Meeting]]:
    """Exchange cards over each group in turn: the rows of all, the dtype of norms, and what steps
    need of each group.

    A collective, in which a rank takes part to the end whatever is wrong, with it or with another
    rank. Raises its own `error`; else `RuntimeError` with that of another, or `ValueError` where
    settings differ or a name counts nowhere.
    """
    meetings = []
    for group in groups:
        mine = mine._replace(error=None if error is None else f"{type(error).__name__}: {error}")
        cards = _exchanged(group, mine)
        error = error or _disagreement(cards)
        members = [card.roster for card in cards]
        roster = unite(members)
        places = max(member.size for member in members)
        checksum = combine.checksum_of(roster.names)
        meetings.append(Meeting(group, places, sources(members, roster), checksum))
        wide = any(card.dtype == torch.float64 for card in cards)
        mine = mine._replace(roster=roster, dtype=torch.float64 if wide else torch.float32)
    error = error or _of_uncounted(mine.roster)
    if error is not None:
        raise error
    return mine.roster, mine.dtype, meetings


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
