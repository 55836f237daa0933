"""Gradients that are spread over process groups by hand: pipeline stages, shards, experts, copies.

At construction the members of each group tell each other the names of their parameters, from which
each works out the same rows. At every step one `all_gather` per group moves what each rank has
measured.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import passes
from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.roster import Roster, Share, sources, unite
from fastclip.gradients import Gradients
from fastclip.ranks import Contributions, said
from fastclip.rules import AGC, Rule
from fastclip.step import Settings

SHOWN = 10  # names that an error lists

OTHERS = (
    "a GradClipper with a process_group keeps to the parameters that required a gradient when it was "
    "built (for others, build a new GradClipper on all ranks)"
)

Counts = Callable[[str, Tensor], bool]
ProcessGroups = dist.ProcessGroup | Sequence[dist.ProcessGroup]


class United(NamedTuple):
    """What `Gradients` of several ranks were on this rank alone."""

    groups: "Groups"
    found: Gradients  # as this rank has measured them
    rows: list[int]  # where theirs are among those of all ranks
    dtype: torch.dtype  # of the norms of all

    def own(self, values: Tensor) -> Tensor:
        """Those of this rank's gradients, of ``[n]`` for all rows."""
        return values.index_select(0, _index(self.rows, values.device))

    def measure_again(self, found: Gradients, p: float, inv_scale: Tensor | None) -> Tensor:
        """The table of all ranks, after their gradients have been changed. A collective."""
        own = replace(self.found, tensors=found.tensors, sparse=found.sparse, contributions=None)
        table = (
            passes.measure_again(own, p, inv_scale)
            if own.tensors
            else tables.empty(p, 0, self.groups.device)
        )
        return self.groups.unite(own, table, None)[1]


class Groups:
    """The groups of one clipper, whose parameters are `tensors` with `names`.

    To build one is a collective of all groups, as `meet` is, whose errors it has.
    """

    def __init__(
        self,
        process_group: Any,
        counts: Any,
        tensors: Sequence[Tensor],
        names: Sequence[str] | None,
        settings: Settings,
    ) -> None:
        groups = groups_of(process_group)
        own, error = Roster((dist.get_rank(),), (), {}), None
        try:
            _refuse_rule(settings.rule)
            own = held(tensors, names, counts)
        except Exception as met:  # raised when the others have been told
            error = met
        mine = Card(dist.get_rank(), own, _described(settings), tables.result_dtype(tensors))
        self._all, self._dtype, self._meetings = meet(groups, mine, error)
        self._own, self._p = own, settings.p
        self.device = tensors[0].device if tensors else torch.device("cpu")
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
                blank = self._nothing(self._own.size, self.device)
                self._exchange(blank, blank.new_zeros(()), [dist.get_rank()])
            raise

    def unite(
        self, found: Gradients, table: Tensor, elsewhere: Tensor | None
    ) -> tuple[Gradients, Tensor, Tensor]:
        """`found`, whose table is ``[n, 5]``, with what the other ranks have; the table of all; and
        whether `elsewhere`, 0-d bool, holds on any rank.

        A collective, to be called within `attended`. Raises `RuntimeError` if another rank could
        not measure, or if a gradient is new on any.
        """
        combine.raise_overdue()
        if not found.names:
            table = self._nothing(0, self.device)[:, : tables.COLUMNS]
        new = [name for name in found.names if name not in self._places]
        own = self._nothing(self._own.size, table.device) if new else self._placed(found, table)
        flag = own.new_zeros(()) if elsewhere is None else elsewhere.to(own.device, own.dtype)
        every, flag, gathered = self._exchange(own, flag, [], 1 if new else 0)
        if new:
            raise RuntimeError(f"gradient {new[0]!r} is of a parameter that is new: {OTHERS}")
        for each in gathered:
            each.settle(OTHERS)
        every = every.view(len(self._all.ranks), len(self._all.names), -1)
        parts, present = every.split([tables.COLUMNS, 1], 2)
        contributions = Contributions(self._all.ranks, parts, present.amax((0, 2)) > 0)
        rows = [self._rows[name] for name in found.names]
        united = replace(
            found,
            names=self._all.names,
            numel=self._numel,
            contributions=contributions,
            united=United(self, found, rows, self._dtype),
        )
        whole = combine.combine(parts, self._sent_to(own.device).counted, self._p)
        return united, whole, flag > 0

    def _exchange(
        self, every: Tensor, flag: Tensor, failed: list[int], new: int = 0
    ) -> tuple[Tensor, Tensor, list[combine.Gathered]]:
        """This rank's contributions, ``[size, 6]``, to those of all; the largest `flag`; and what
        is to be settled.

        `failed` has this rank if it could not measure; `new` is 1 if it has a gradient that the
        ranks have not told each other of. What goes wrong in one group the next ones hear of.
        """
        self._took_part = True
        on_host, unsettled = every.device.type == "cpu", []
        for meeting, index in zip(self._meetings, self._sent_to(every.device).sources, strict=True):
            first = failed[0] if failed else None
            header = combine.pack(every[:0, : tables.COLUMNS], (), meeting.checksum + new, first)
            padding = self._nothing(meeting.places - len(every) + 1, every.device)
            padding[-1, tables.NAN] = flag
            gathered = combine.gather(torch.cat([header, every, padding]), meeting.group)
            if on_host:
                failed = failed + _troubled(gathered, meeting.checksum)
                unsettled.append(gathered)
            else:
                gathered.settle(OTHERS)  # raises later, but marks what the next group is sent
            flag = gathered.tables[:, -1, tables.NAN].amax()
            rows = torch.cat([gathered.tables, gathered.flags[:, :, None]], 2)[:, :-1]
            every = torch.cat([rows.flatten(0, 1), self._nothing(1, every.device)])
            every = every.index_select(0, index)
        return every, flag, unsettled

    def _placed(self, found: Gradients, table: Tensor) -> Tensor:
        """The rows of this rank's roster, with flags: ``[size, 6]``."""
        rows = torch.cat([table, table.new_full((len(table), 1), combine.PRESENT)], 1)
        if found.names == self._own.names:
            return rows
        places = _index([self._places[name] for name in found.names], table.device)
        return self._nothing(self._own.size, table.device).index_copy(0, places, rows)

    def _nothing(self, n: int, device: torch.device) -> Tensor:
        """Rows without elements, with their flags, ``[n, 6]``."""
        rows = tables.empty(self._p, n, device)
        return torch.cat([rows, rows.new_zeros(n, 1)], 1)

    def _sent_to(self, device: torch.device) -> "_Sent":
        if device not in self._sent:
            counted = torch.tensor(self._all.weights(), dtype=torch.bool, device="cpu")
            sources = [_index(meeting.sources, device) for meeting in self._meetings]
            self._sent[device] = _Sent(counted.to(device), sources)
        return self._sent[device]

    def __repr__(self) -> str:
        return said(self._all.ranks)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a GradClipper with a process_group can be neither pickled nor copied: the group is of "
            "this process. Build a new one, and give it the state_dict of this one"
        )


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    index = torch.tensor(places, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        index = index.pin_memory()  # else the copy waits for the device
    return index.to(device, non_blocking=True)


def _troubled(gathered: combine.Gathered, checksum: int) -> list[int]:
    """The ranks that could not measure or have a new gradient, or have heard of one."""
    header = gathered.header.tolist()
    pairs = zip(gathered.ranks, header, strict=True)
    different = [rank for rank, own in pairs if own[combine.CHECKSUM] != checksum]
    return gathered.known_failed() + different


def _described(settings: Settings) -> str:
    """What has to be the same on all ranks, as far as it can be compared."""
    rule: Any = settings.rule
    options = {f.name: getattr(rule, f.name) for f in fields(rule)} if is_dataclass(rule) else {}
    numbers = (f"{k}={v!r}" for k, v in options.items() if v is None or isinstance(v, (int, float)))
    return (
        f"{type(rule).__name__}({', '.join(numbers)}), norm_type={settings.p:g}, "
        f"nonfinite={settings.policy!r}"
    )


def _refuse_rule(rule: Rule) -> None:
    if isinstance(rule, AGC):
        raise TypeError(
            "AGC looks at whole gradients and parameters, of which a rank of a process_group may "
            "hold a shard: take AdaGC, which clips each tensor by its norm, or another rule"
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
    checksum: int  # of the rows


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
