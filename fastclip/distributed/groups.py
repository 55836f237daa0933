"""Gradients that are spread over process groups by hand: pipeline stages, shards, experts, copies.

At construction the members of each group tell each other the names of their parameters, from which
each works out the same rows. At every step one `all_gather` per group moves what each rank has
measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import passes
from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.meeting import (
    Card,
    Meeting,
    described,
    groups_of,
    held,
    meet,
    refuse_rule,
)
from fastclip.distributed.roster import Roster
from fastclip.gradients import Gradients
from fastclip.ranks import Contributions, said
from fastclip.step import Settings

OTHERS = (
    "a GradClipper with a process_group keeps to the parameters that required a gradient when it "
    "was built (for others, build a new GradClipper on all ranks)"
)


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
        table = tables.empty(p, 0, self.groups.device)
        with self.groups.guarded():
            if own.tensors:
                table = passes.measure_again(own, p, inv_scale)
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
            refuse_rule(settings.rule)
            own = held(tensors, names, counts)
        except Exception as met:  # raised when the others have been told
            error = met
        mine = Card(dist.get_rank(), own, described(settings), tables.result_dtype(tensors))
        self._all, self._dtype, self._meetings = meet(groups, mine, error)
        self._own, self._p = own, settings.p
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._places = {name: place for place, name in enumerate(own.names)}
        self._rows = {name: row for row, name in enumerate(self._all.names)}
        self._numel = self._all.numel()
        self._all_count = all(share.counts for share in self._all.shares.values())
        self._sent: dict[torch.device, _Sent] = {}
        self._zeroes = settings.policy == "zero"
        self._took_part = False
        self.agreed = 0  # `combine.agreed` of the options of a step

    @property
    def names(self) -> tuple[str, ...]:
        """Of all rows."""
        return self._all.names

    def attended(self) -> AbstractContextManager[None]:
        """`guarded`, for a step. Raises what is overdue from the last one, as all ranks do."""
        for meeting in self._meetings:
            try:
                dist.get_process_group_ranks(meeting.group)
            except KeyError as error:
                raise RuntimeError(
                    "a group of process_group has been destroyed: build a new GradClipper with a "
                    "group that is there, and give it the state_dict of this one"
                ) from error
        combine.raise_overdue()
        return self.guarded()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around an exchange: what goes wrong on this rank alone, before it has taken part, does
        not leave the others waiting there; they raise `RuntimeError`."""
        self.begin()
        try:
            yield
        except BaseException as error:
            if not self._took_part:
                blank = self._nothing(self._own.size, self.device)
                failed = dist.get_rank()
                if isinstance(error, combine.FailedElsewhere):
                    failed = error.rank
                self._exchange(blank, blank.new_zeros(()), failed=failed)
            raise

    def begin(self) -> None:
        """An exchange is to come, which the others wait for."""
        self._took_part = False

    def unite(
        self, found: Gradients, table: Tensor, elsewhere: Tensor | None
    ) -> tuple[Gradients, Tensor, Tensor]:
        """`found`, whose table is ``[n, 5]``, with what the other ranks have; the table of all; and
        whether `elsewhere`, 0-d bool, holds on any rank, or copies differ under "zero".

        A collective, to be called within `guarded`. Raises `RuntimeError` if another rank could
        not measure, or if a gradient is new on any.
        """
        if not found.names:
            table = self._nothing(0, self.device)[:, : tables.COLUMNS]
        new = [name for name in found.names if name not in self._places]
        own = self._nothing(self._own.size, table.device) if new else self._placed(found, table)
        flag = own.new_zeros(()) if elsewhere is None else elsewhere.to(own.device, own.dtype)
        every, flag, gathered = self._exchange(own, flag, new=len(new) > 0)
        if new:
            raise RuntimeError(f"gradient {new[0]!r} is of a parameter that is new: {OTHERS}")
        for each in gathered:
            each.settle(OTHERS)
        every = every.view(len(self._all.ranks), len(self._all.names), -1)
        parts, present = every.split([tables.COLUMNS, 1], 2)
        counted = self._sent_to(own.device).counted
        there = present.amax((0, 2)) > 0
        contributions = self._contributions(parts, there)
        rows = [self._rows[name] for name in found.names]
        united = replace(
            found,
            names=self._all.names,
            numel=self._numel,
            contributions=contributions,
            united=United(self, found, rows, self._dtype),
        )
        whole = combine.combine(parts, counted, self._p, self._all_count)
        found_elsewhere = flag > 0
        if self._zeroes and not self._all_count:
            shares = self._sent_to(own.device).shares * (present[:, :, 0] > 0)
            every_one = Contributions(self._all.ranks, parts, there, shares)
            found_elsewhere = found_elsewhere | every_one.torn()
        return united, whole, found_elsewhere

    def _exchange(
        self, every: Tensor, flag: Tensor, failed: int | None = None, new: bool = False
    ) -> tuple[Tensor, Tensor, list[combine.Gathered]]:
        """This rank's contributions, ``[size, 6]``, to those of all; the largest `flag`; and what
        is to be settled.

        `failed` is this rank if it could not measure; `new` tells that it has a gradient which the
        ranks have not told each other of. What goes wrong in one group the next ones hear of.
        """
        self._took_part = True
        unsettled = []
        sent = self._sent_to(every.device)
        heard: Tensor | int = 0 if failed is None else failed + 1  # one over a rank in trouble
        last = len(self._meetings) - 1
        for number, meeting in enumerate(self._meetings):
            packed = sent.packed[number].clone()
            packed[combine.HEADER : combine.HEADER + len(every)] = every
            packed[-1, tables.NAN] = flag
            packed[combine.FAILED, tables.COLUMNS] = heard
            packed[combine.AGREED, tables.COLUMNS] = self.agreed
            if new:
                packed[combine.CHECKSUM, tables.COLUMNS] += 1
            gathered = combine.gather(packed, meeting.group)
            if number < last:
                different = gathered.header[:, combine.CHECKSUM] != meeting.checksum
                different = different | (gathered.header[:, combine.AGREED] != self.agreed)
                told = gathered.header[:, combine.FAILED]
                worst = torch.where(different, sent.ranks[number] + 1, told).amax()
                heard = worst if failed is None else heard
            if every.device.type == "cpu":
                unsettled.append(gathered)
            else:
                gathered.settle(OTHERS)  # raises later, but marks what the next group is sent
            flag = gathered.tables[:, -1, tables.NAN].amax()
            rows = torch.cat([gathered.tables, gathered.flags[:, :, None]], 2)[:, :-1]
            every = torch.cat([rows.flatten(0, 1), sent.nothing])
            every = every.index_select(0, sent.sources[number])
        return every, flag, unsettled

    def _contributions(self, parts: Tensor, present: Tensor) -> Contributions:
        """Those of ranks, in their order, without what meshes have made of them."""
        ranks = self._all.ranks
        real = [ranks.index(rank) for rank in sorted(ranks) if rank >= 0]
        if real != list(range(len(ranks))):
            parts = parts.index_select(0, _index(real, parts.device))
        return Contributions(tuple(ranks[number] for number in real), parts, present)

    def _placed(self, found: Gradients, table: Tensor) -> Tensor:
        """The contributions of this rank's roster, with flags: ``[size, 6]``."""
        held, ranks, me = found.contributions, self._own.ranks, dist.get_rank()
        flags = table.new_full((len(table), 1), combine.PRESENT)
        if held is not None:
            flags = flags * held.present[:, None]
        if found.names == self._own.names and len(ranks) == 1:
            return torch.cat([table, flags], 1)
        places = _index([self._places[name] for name in found.names], table.device)
        every = self._nothing(self._own.size, table.device)
        every = every.view(len(ranks), len(self._own.names), every.shape[1])
        parts = {} if held is None else dict(zip(held.ranks, held.tables, strict=True))
        for number, rank in enumerate(ranks):
            if rank < 0 or rank == me or rank in parts:
                part = torch.cat([parts.get(rank, table), flags], 1)
                every[number].index_copy_(0, places, part)
        return every.flatten(0, 1)

    def _nothing(self, n: int, device: torch.device) -> Tensor:
        """Rows without elements, with their flags, ``[n, 6]``."""
        rows = tables.empty(self._p, n, device)
        return torch.cat([rows, rows.new_zeros(n, 1)], 1)

    def _sent_to(self, device: torch.device) -> "_Sent":
        if device not in self._sent:
            counted = torch.tensor(self._all.weights(), dtype=torch.bool, device="cpu")
            shares = torch.tensor(self._all.signs(), dtype=torch.int32, device="cpu").to(device)
            sources = [_index(meeting.sources, device) for meeting in self._meetings]
            ranks = [
                _index(dist.get_process_group_ranks(meeting.group), device)
                for meeting in self._meetings
            ]
            nothing = self._nothing(1, device)
            packed = [self._packed(meeting, device) for meeting in self._meetings]
            self._sent[device] = _Sent(counted.to(device), shares, sources, ranks, nothing, packed)
        return self._sent[device]

    def _packed(self, meeting: Meeting, device: torch.device) -> Tensor:
        """What is sent with nothing in it; the last row is for the flag."""
        header = combine.pack(tables.empty(self._p, 0, device), (), meeting.checksum)
        return torch.cat([header, self._nothing(meeting.places + 1, device)])

    def __repr__(self) -> str:
        return said(rank for rank in self._all.ranks if rank >= 0)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a GradClipper with a process_group can be neither pickled nor copied: the group is of "
            "this process. Build a new one, and give it the state_dict of this one"
        )


class _Sent(NamedTuple):
    """What steps need on a device."""

    counted: Tensor  # [ranks, names] bool
    shares: Tensor  # [ranks, names] int32, as in `Contributions`
    sources: list[Tensor]  # of each meeting
    ranks: list[Tensor]  # global ones, of each meeting
    nothing: Tensor  # [1, 6], a row without elements
    packed: list[Tensor]  # what is sent to each meeting, with no numbers yet


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    index = torch.tensor(places, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        index = index.pin_memory()  # else the copy waits for the device
    return index.to(device, non_blocking=True)
