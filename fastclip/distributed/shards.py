"""What this process holds of DTensors, and how its table becomes that of the whole tensors.

The local parts are measured and rescaled as any other tensors; only tables travel, in one
collective for every set of processes that a mesh is made of.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.combine import Contributions, Gathered, Weights
from fastclip.distributed.layouts import (
    Layout,
    PartialOf,
    default_group,
    local_of,
    reduced_part,
    world,
)
from fastclip.distributed.plans import (
    Gathering,
    OnDevice,
    first_stray,
    index,
    meet,
    planned,
    sent,
    weights_of,
)

if TYPE_CHECKING:
    from fastclip.rules.contract import Measured

SAME = "all processes of a mesh need the same parameters in the same order"


@dataclass(frozen=True)
class Spread:
    """How the gradients of a list are spread over processes: of each gradient, in its place.

    `rows` are the places of the rows of a table, None if those are all in order.
    """

    layouts: list[Layout | None]  # None: no DTensor
    called: list[str]  # what errors call it
    numel: list[int]  # of the whole tensor
    present: list[bool]  # whether this process has it
    partial: dict[int, PartialOf]  # by place
    checksum: int
    alone: bool  # whether what is no DTensor is this process's own; else every process has it
    plan: list[Gathering]  # empty until it is needed
    rows: tuple[int, ...] | None = None
    agreed: int = 0  # `combine.agreed` of the options of a call
    refused: TypeError | None = None  # what to raise where the gradients are looked at
    # of this call: "exchange" once this process has begun the collective that the others wait in
    begun: set[str] = field(default_factory=set)

    def of_rows(self, places: Sequence[int]) -> "Spread":
        """The same for a table that has rows for these places only."""
        return replace(self, rows=None if len(places) == len(self.numel) else tuple(places))

    def places(self) -> Sequence[int]:
        """Of the rows."""
        return range(len(self.numel)) if self.rows is None else self.rows

    @torch.no_grad()
    def reduced(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """By place, what to measure instead of the partial ones of `tensors`, which are those of
        the rows: a reduced copy, of which every process has a part. One collective for each,
        after one that tells whether all processes are about to: `RuntimeError` if not."""
        if self.refused is not None:
            raise self.refused
        if not self.partial:
            return {}
        self.begun.add("exchange")
        self._wait_to_reduce(tensors[0].device)
        self.begun.discard("exchange")  # that of what is measured is still to come
        of_place = zip(self.places(), tensors, strict=True)
        return {
            place: _reduced(tensor, self.partial[place])
            for place, tensor in of_place
            if place in self.partial
        }

    def _wait_to_reduce(self, device: torch.device) -> None:
        """Exchange tables before there are any. A process that has nothing to reduce, or that could
        not measure, comes with its own, and nobody is left waiting."""
        combine.raise_overdue()
        blank, failed = tables.empty(2, len(self.numel), device), list[int]()
        plan = self._met()
        every = [self._exchange(gathering, blank, failed, waits=True) for gathering in plan]
        for gathering, gathered in zip(plan, every, strict=True):
            gathered.refuse_failed()
            gathered.refuse_different(SAME)
            gathered.refuse_unreduced(self._called(gathering))

    def held(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parts of parameters that this process has."""
        return [
            local_of(each).detach() if isinstance(each, DTensor) else each for each in parameters
        ]

    def refuse_partial(self, labels: Sequence[str], called: Callable[[str], str]) -> None:
        """Raise `TypeError` if a gradient is partial, for what is done element by element."""
        if self.refused is not None:
            raise self.refused
        for place, partial in self.partial.items():
            raise TypeError(
                f"{called(labels[place])} is a DTensor with placements "
                f"{partial.layout.placements}: its elements are known only when it is reduced, so "
                "that they cannot be clamped"
            )

    def agree(self, flag: Tensor) -> Tensor:
        """Whether `flag`, 0-d bool, holds on any of the processes."""
        for gathering in self._met():
            flag = combine.any_of(flag, gathering.group or default_group())
        return flag

    def with_units(self, measured: "Measured", parameters: Sequence[Tensor]) -> "Measured":
        """`measured` with the `whole_units` of its gradients and `parameters`, those of the rows.
        Errors as in `units.of_whole` and `combine`.

        Waits for the device: a process that could not measure takes no part in these collectives.
        """
        from fastclip.distributed import units  # which knows of rules, as nothing else here does

        combine.raise_overdue()
        places = self.places()
        of_grads = [self.layouts[place] for place in places]
        present = [self.present[place] for place in places]
        return units.of_whole(measured, parameters, self.held(parameters), of_grads, present)

    def least(self, columns: Tensor) -> Tensor:
        """For each row the smallest that a process with a part of it has, ``[n, k]``: NaN where one
        has NaN, and infinity where none has a part."""
        every = columns.new_full((len(self.numel), columns.shape[1]), math.inf)
        rows = [
            (row, place)
            for row, place in enumerate(self.places())
            if self.present[place] and ((layout := self.layouts[place]) is None or layout.ranks)
        ]
        if rows:
            mine, own = zip(*rows, strict=True)
            every[index(own, columns.device)] = columns[index(mine, columns.device)]
        for gathering in self._met():
            members = index(gathering.members, columns.device)
            every[members] = combine.least_of(every[members], gathering.group or default_group())
        return every if self.rows is None else every[index(self.rows, columns.device)]

    @contextmanager
    def attended(self, grads: Sequence[Tensor]) -> Iterator[None]:
        """Around all that comes before an exchange: what goes wrong on this process alone does not
        leave the others waiting there; they raise `RuntimeError`. `grads` are those of the list."""
        try:
            yield
        except BaseException:
            if "exchange" not in self.begun:
                self._take_part(grads)
            raise

    def _take_part(self, grads: Sequence[Tensor]) -> None:
        """Exchange tables although this process could not measure, and let the others know."""
        self.begun.add("exchange")
        device = grads[0].device if grads else torch.device("cpu")
        blank = tables.empty(2.0, len(self.numel), device)
        failed = [dist.get_rank()]
        for gathering in self._met():
            self._exchange(gathering, blank, failed)

    @torch.no_grad()
    def combine(self, table: Tensor, p: float) -> tuple[Tensor, Contributions]:
        """The table of the whole tensors, from those of the parts that the processes hold.

        Raises `RuntimeError` on every process that hears of one that could not measure, or whose
        gradients are others.
        """
        combine.raise_overdue()
        self.begun.add("exchange")
        places = table
        if self.rows is not None:
            places = tables.empty(p, len(self.numel), table.device)
            places[index(self.rows, table.device)] = table
        plan = self._met()
        failed: list[int] = []
        every = [self._exchange(gathering, places, failed) for gathering in plan]
        for gathering, gathered in zip(plan, every, strict=True):
            gathered.settle(SAME, self._called(gathering))
        weights = list(map(weights_of, plan, every))
        parts = [
            combine.combine(gathered.tables, of.counted, p, of.all_count)
            for gathered, of in zip(every, weights, strict=True)
        ]
        if len(plan) == 1 and len(plan[0].members) == len(self.numel):
            of = weights[0]
            held = Contributions(every[0].ranks, every[0].tables, of.present, of.shares)
            whole = parts[0]
        else:
            held, whole = self._contributions(every, weights, places, p), places.clone()
            for gathering, part in zip(plan, parts, strict=True):
                whole[self._on_device(gathering, table.device).members] = part
        if self.rows is not None:
            rows = index(self.rows, table.device)
            whole = whole[rows]
            shares = None if held.shares is None else held.shares[:, rows]
            held = Contributions(held.ranks, held.tables[:, rows], held.present[rows], shares)
        return whole, held

    def _exchange(
        self, gathering: Gathering, places: Tensor, failed: list[int], waits: bool = False
    ) -> Gathered:
        """One collective. What it tells of processes that could not measure, on the CPU, is added
        to `failed`, and passed on by the next. `waits` marks what is partial by negative flags."""
        members, own = gathering.members, places
        there = self._on_device(gathering, places.device)
        if len(members) < len(places):
            own = places[there.members]
        if failed or waits or not all(self.present):
            pairs = zip(members, gathering.flags, strict=True)
            flags = [every if self.present[place] else 0 for place, every in pairs]
            if waits:
                pairs = zip(members, flags, strict=True)
                flags = [-every if place in self.partial else every for place, every in pairs]
            packed = combine.pack(own, flags, self.checksum, failed[0] if failed else None)
        else:
            packed = there.packed.clone()
            packed[combine.HEADER :, : tables.COLUMNS] = own
        packed[combine.AGREED, tables.COLUMNS] = self.agreed
        gathered = combine.gather(packed, gathering.group or default_group())
        failed.extend(gathered.known_failed())
        return gathered

    def _on_device(self, gathering: Gathering, device: torch.device) -> OnDevice:
        if device not in gathering.on_device:
            blank = tables.empty(2, len(gathering.members), device)
            packed = combine.pack(blank, gathering.flags, self.checksum)
            gathering.on_device[device] = OnDevice(index(gathering.members, device), packed)
        return gathering.on_device[device]

    def _contributions(
        self, every: list[Gathered], weights: list[Weights], places: Tensor, p: float
    ) -> Contributions:
        """What the processes of all collectives held; of each in those that it has no part in, rows
        without elements."""
        me, n, device = dist.get_rank(), len(self.numel), places.device
        ranks = tuple(sorted({me, *(rank for gathered in every for rank in gathered.ranks)}))
        held = tables.empty(p, len(ranks) * n, device).view(len(ranks), n, tables.COLUMNS)
        held[ranks.index(me)] = places
        shares = torch.zeros(held.shape[:2], dtype=torch.int32, device=device)
        present = sent(torch.tensor(self.present, device="cpu"), device)
        for gathering, gathered, of in zip(self._met(), every, weights, strict=True):
            members = self._on_device(gathering, device).members
            present[members] = of.present
            told = of.shares
            for number, rank in enumerate(gathered.ranks):
                held[ranks.index(rank), members] = gathered.tables[number]
                shares[ranks.index(rank), members] = 1 if told is None else told[number]
        return Contributions(ranks, held, present, shares)

    def _called(self, gathering: Gathering) -> list[str]:
        return [self.called[place] for place in gathering.members]

    def _met(self) -> list[Gathering]:
        """The collectives, in the order in which their processes first come in the list.

        Before the first of a list, the processes tell each other that it is the same on all: tables
        of other sizes would end them. Raises `RuntimeError` on all if it is not.
        """
        if not self.plan:
            plan = planned(self.layouts, self.alone, world())
            stray = None if self.alone or not plan else first_stray(self.layouts, plan)
            meet(plan, self.checksum, SAME, stray and self.called[stray[0]] + stray[1])
            self.plan.extend(plan)
        return self.plan


def _reduced(tensor: Tensor, partial: PartialOf) -> Tensor:
    with combine.naming(partial.layout.ranks):
        return reduced_part(tensor, partial)
