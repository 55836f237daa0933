"""What this process holds of DTensors, and how its table becomes that of the whole tensors.

The local parts are measured and rescaled as any other tensors; only tables travel, in one
collective for every set of processes that a mesh is made of. Every use of what DTensor keeps
private is in this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fastclip import table as tables
from fastclip.distributed import combine
from fastclip.distributed.combine import COUNTED, OWNER, PRESENT, Contributions, Gathered

LINEAR = frozenset({"sum", "avg"})  # kinds of Partial that a coefficient passes through
PLANS = 64  # lists whose collectives are kept

Placements = tuple[Placement, ...]


class Layout(NamedTuple):
    """Where the elements of DTensors of one mesh and the same placements are."""

    mesh: DeviceMesh
    placements: Placements
    ranks: tuple[int, ...]  # of the mesh, sorted; none where this process is not one of them
    counted: bool  # whether the part of this process is, or is a replica of one that is
    reduced: Placements | None  # in which a partial gradient is measured
    divisor: int  # what its sum is divided by


class Gathering(NamedTuple):
    """One collective: the processes, and the places of a list whose rows it combines."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: the default one, which no cache may keep alive
    members: list[int]
    flags: list[int]  # of members that are present


class PartialOf(NamedTuple):
    """What it takes to reduce a partial gradient."""

    layout: Layout
    local: torch.Size
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass
class _World:
    """What is kept for as long as the default process group."""

    # None: of partial ones, which are by number of dimensions as well
    layouts: dict[tuple[DeviceMesh, Placements], Layout | None] = field(default_factory=dict)
    partial: dict[tuple[DeviceMesh, Placements, int], Layout] = field(default_factory=dict)
    plans: dict[tuple[bool | int, ...], list[Gathering]] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)


_worlds: "WeakKeyDictionary[dist.ProcessGroup, _World]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Spread:
    """How the gradients of a list are spread over processes: of each gradient, in its place.

    `rows` are the places of the rows of a table, None if those are all in order.
    """

    layouts: list[Layout | None]  # None: no DTensor
    numel: list[int]  # of the whole tensor
    present: list[bool]  # whether this process has it
    partial: dict[int, PartialOf]  # by place
    checksum: int
    alone: bool  # whether what is no DTensor is this process's own; else every process has it
    rows: tuple[int, ...] | None = None

    def of_rows(self, places: Sequence[int]) -> "Spread":
        """The same for a table that has rows for these places only."""
        return replace(self, rows=None if len(places) == len(self.numel) else tuple(places))

    def places(self) -> Sequence[int]:
        """Of the rows."""
        return range(len(self.numel)) if self.rows is None else self.rows

    @torch.no_grad()
    def reduced(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """By place, what to measure instead of the partial ones of `tensors`, which are those of
        the rows: a reduced copy, of which every process has a part. One collective for each."""
        if not self.partial:
            return {}
        of_place = zip(self.places(), tensors, strict=True)
        return {
            place: _reduced(tensor, self.partial[place])
            for place, tensor in of_place
            if place in self.partial
        }

    def refuse_partial(self, labels: Sequence[str], called: Callable[[str], str]) -> None:
        """Raise `TypeError` if a gradient is partial, for what is done element by element."""
        for place, partial in self.partial.items():
            raise TypeError(
                f"{called(labels[place])} is a DTensor with placements "
                f"{partial.layout.placements}: its elements are known only when it is reduced, so "
                "that they cannot be clamped"
            )

    def agree(self, flag: Tensor) -> Tensor:
        """Whether `flag`, 0-d bool, holds on any of the processes."""
        for gathering in self._plan():
            flag = combine.any_of(flag, gathering.group or _default_group())
        return flag

    def take_part(self, device: torch.device, p: float) -> None:
        """Exchange tables although this process could not measure, and let the others know."""
        blank = tables.empty(p, len(self.numel), device)
        failed = [dist.get_rank()]
        for gathering in self._plan():
            self._exchange(gathering, blank, failed)

    @torch.no_grad()
    def combine(self, table: Tensor, p: float) -> tuple[Tensor, Contributions]:
        """The table of the whole tensors, from those of the parts that the processes hold.

        Raises `RuntimeError` on every process that hears of one that could not measure, or whose
        gradients are others.
        """
        combine.raise_overdue()
        places = table
        if self.rows is not None:
            places = tables.empty(p, len(self.numel), table.device)
            places[_index(self.rows, table.device)] = table
        plan = self._plan()
        failed: list[int] = []
        every = [self._exchange(gathering, places, failed) for gathering in plan]
        for gathered in every:
            gathered.settle("all processes of a mesh need the same parameters in the same order")
        parts = [combine.combine(each.tables, each.counted, p) for each in every]
        if len(plan) == 1 and len(plan[0].members) == len(self.numel):
            held, whole = every[0].contributions(), parts[0]
        else:
            held, whole = self._contributions(every, places, p), places.clone()
            for gathering, part in zip(plan, parts, strict=True):
                whole[_index(gathering.members, table.device)] = part
        if self.rows is not None:
            rows = _index(self.rows, table.device)
            whole = whole[rows]
            held = Contributions(held.ranks, held.tables[:, rows], held.present[rows])
        return whole, held

    def _exchange(self, gathering: Gathering, places: Tensor, failed: list[int]) -> Gathered:
        """One collective. What it tells of processes that could not measure, on the CPU, is added
        to `failed`, and passed on by the next."""
        members, own = gathering.members, places
        if len(members) < len(places):
            own = places[_index(members, places.device)]
        flags = gathering.flags
        if not all(self.present):
            pairs = zip(members, flags, strict=True)
            flags = [every if self.present[place] else 0 for place, every in pairs]
        packed = combine.pack(own, flags, self.checksum, failed[0] if failed else None)
        gathered = combine.gather(packed, gathering.group or _default_group())
        failed.extend(gathered.known_failed())
        return gathered

    def _contributions(self, every: list[Gathered], places: Tensor, p: float) -> Contributions:
        """What the processes of all collectives held; of each in those that it has no part in, rows
        without elements."""
        me, n, device = dist.get_rank(), len(self.numel), places.device
        ranks = tuple(sorted({me, *(rank for gathered in every for rank in gathered.ranks)}))
        held = tables.empty(p, len(ranks) * n, device).view(len(ranks), n, tables.COLUMNS)
        held[ranks.index(me)] = places
        present = _sent(torch.tensor(self.present, device="cpu"), device)
        for gathering, gathered in zip(self._plan(), every, strict=True):
            members = _index(gathering.members, device)
            present[members] = gathered.present
            for rank, table in zip(gathered.ranks, gathered.tables, strict=True):
                held[ranks.index(rank), members] = table
        return Contributions(ranks, held, present)

    def _plan(self) -> list[Gathering]:
        """The collectives, in the order in which their processes first come in the list."""
        world = _world()
        key = (self.alone, *map(id, self.layouts))  # of layouts that the same object keeps
        plan = world.plans.get(key)
        if plan is None:
            if len(world.plans) >= PLANS:
                world.plans.clear()
            plan = world.plans[key] = _planned(self.layouts, self.alone, world)
        return plan


def spread_of(
    tensors: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    called: Callable[[str], str],
    alone: bool,
) -> tuple[list[Tensor | None], Spread] | None:
    """What this process holds of `tensors`, in the same places, and how they are spread; None if
    none of them is a DTensor over more than one process.

    Where `parameters` are known, each that requires a gradient has a place with a tensor, an empty
    one without a gradient: what the processes exchange must not depend on who has which. One that
    comes again has none.

    Raises `TypeError` for a partial gradient that a coefficient does not pass through.
    """
    sources: Sequence[Tensor | None] = parameters or tensors
    if not any(isinstance(each, DTensor) and each.device_mesh.size() > 1 for each in sources):
        return None
    layouts, seen = _Layouts(), set[int]()
    places: list[Tensor | None] = []
    shared = names
    if alone:
        pairs = zip(names, sources, strict=True)
        shared = [name for name, source in pairs if isinstance(source, DTensor)]
    spread = Spread([], [], [], {}, combine.checksum_of(shared), alone)
    for position, tensor in enumerate(tensors):
        source = tensor
        if parameters:
            parameter = parameters[position]
            if source is None and parameter.requires_grad:
                source = parameter
            if id(parameter) in seen:
                source = None
            seen.add(id(parameter))
        if source is None:
            places.append(None)
            continue
        layout, local = None, source
        if not isinstance(source, DTensor):
            numel = source.numel()
        else:
            layout, local = layouts.of(source), _local(source)
            numel = source._spec.shape.numel()  # source.numel() takes 0.6 us
            if layout is None:
                raise TypeError(_not_linear(called(names[position]), source))
            if tensor is not None and layout.reduced is not None:
                partial = PartialOf(layout, local.shape, source.shape, source.stride())
                spread.partial[len(spread.numel)] = partial
        spread.layouts.append(layout)
        spread.numel.append(numel)
        spread.present.append(tensor is not None)
        places.append(local.detach().new_empty(0) if tensor is None else local)
    return places, spread


class _Layouts:
    """The layouts of the DTensors of a list, of which most are like the one before, down to the
    very objects: then nothing has to be hashed, which takes 2 us."""

    def __init__(self) -> None:
        self._world = _world()
        self._last: tuple[object, object, int, Layout | None] = (None, None, 0, None)

    def of(self, source: DTensor) -> Layout | None:
        """None if it is partial in a way that is not linear."""
        spec = source._spec
        mesh, placements, dims, layout = self._last
        if mesh is spec.mesh and placements == spec.placements:
            if layout is not None and (layout.reduced is None or dims == source.dim()):
                return layout
        layout = _layout(source, self._world)
        self._last = spec.mesh, spec.placements, source.dim(), layout
        return layout


def _layout(source: DTensor, world: _World) -> Layout | None:
    spec = source._spec
    key = (spec.mesh, spec.placements)
    if key not in world.layouts:
        partial = any(
            placement.is_partial() and spec.mesh.size(dim) > 1
            for dim, placement in enumerate(spec.placements)
        )
        world.layouts[key] = None if partial else _made(*key, None)
    layout = world.layouts[key]
    if layout is not None:
        return layout
    of_dims = (*key, source.dim())
    if of_dims not in world.partial:
        reduced = _reducible(spec.mesh, spec.placements, source.dim())
        if reduced is None:
            return None
        world.partial[of_dims] = _made(*key, reduced)
    return world.partial[of_dims]


def _made(mesh: DeviceMesh, placements: Placements, reduced: Placements | None) -> Layout:
    place, divisor = mesh.get_coordinate(), 1
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            divisor *= mesh.size(dim)
    if place is None:
        return Layout(mesh, placements, (), False, reduced, divisor)
    counted = all(
        number == 0 or not isinstance(placement, Replicate)
        for number, placement in zip(place, reduced or placements, strict=True)
    )
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    return Layout(mesh, placements, ranks, counted, reduced, divisor)


def _reducible(mesh: DeviceMesh, placements: Placements, dims: int) -> Placements | None:
    """The placements with the partial ones reduced: sharded along a dimension that nothing else
    shards, where there is one, else replicated. None if one of them is not linear."""
    free = [dim for dim in range(dims) if not any(each.is_shard(dim) for each in placements)]
    reduced: list[Placement] = []
    for number, placement in enumerate(placements):
        if not placement.is_partial():
            reduced.append(placement)
        elif mesh.size(number) == 1:
            reduced.append(Replicate())
        elif type(placement) is not Partial or placement.reduce_op not in LINEAR:
            return None
        else:
            reduced.append(Shard(free.pop(0)) if free else Replicate())
    return tuple(reduced)


def _not_linear(what: str, source: DTensor) -> str:
    return (
        f"{what} is a DTensor with placements {source.placements}: partial values that are not "
        "summed or averaged cannot be measured or rescaled before they are reduced"
    )


def _reduced(stored: Tensor, partial: PartialOf) -> Tensor:
    layout = partial.layout
    if not layout.ranks:
        return stored
    # As a sum: gloo has no averages.
    placements = [Partial() if each.is_partial() else each for each in layout.placements]
    local = stored.detach().expand(partial.local)
    whole = DTensor.from_local(
        *(local, layout.mesh, placements),
        run_check=False,
        shape=partial.shape,
        stride=partial.stride,
    )
    part = _local(whole.redistribute(layout.mesh, layout.reduced))
    return part if layout.divisor == 1 else part / layout.divisor


def held(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of parameters that this process has."""
    return [_local(each).detach() if isinstance(each, DTensor) else each for each in parameters]


def _local(source: DTensor) -> Tensor:
    local = source._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _planned(layouts: Sequence[Layout | None], alone: bool, world: _World) -> list[Gathering]:
    """A collective for each set of processes that is part of no other, in the order of the list.

    What lies on smaller meshes rides along, as replicas of what the other processes have on theirs
    (of a mesh for FSDP and tensor parallelism, some tensors are on the part for FSDP alone): the
    first of these meshes counts. So do tensors that are no DTensors, each process a mesh to itself.
    With `alone`, there is a collective for each mesh, and what is no DTensor is the process's own.
    """
    firsts: dict[tuple[int, ...], Layout] = {}
    for layout in layouts:
        if layout is not None and layout.ranks:
            firsts.setdefault(layout.ranks, layout)
    plan = {
        ranks: Gathering(ranks, _group(layout, world), [], [])
        for ranks, layout in firsts.items()
        if len(ranks) > 1 and (alone or not any(set(ranks) < set(other) for other in firsts))
    }
    if not plan:  # a process outside all the meshes
        return []
    largest = max(plan.values(), key=lambda gathering: len(gathering.ranks))
    for place, layout in enumerate(layouts):
        ranks = (dist.get_rank(),) if layout is None else layout.ranks
        hosts = [gathering for gathering in plan.values() if set(ranks) <= set(gathering.ranks)]
        if alone:
            hosts = [gathering for gathering in hosts if layout and ranks == gathering.ranks]
        if not hosts:
            continue
        host = largest if layout is None else plan.get(ranks, hosts[0])
        host.members.append(place)
        counted = layout is None or layout.counted
        host.flags.append(PRESENT + COUNTED * counted + OWNER * (1 + min(ranks, default=-1)))
    return list(plan.values())


def _group(layout: Layout, world: _World) -> dist.ProcessGroup | None:
    """The process group of all processes of a mesh."""
    ranks = layout.ranks
    if len(ranks) == dist.get_world_size():
        if layout.mesh.ndim > 1 or layout.mesh.get_group() is _default_group():
            return None
    if layout.mesh.ndim == 1:
        return layout.mesh.get_group()
    if ranks not in world.groups:
        # Made by its members alone: the others may have no such mesh.
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        world.groups[ranks] = group
    return world.groups[ranks]


def _world() -> _World:
    return _worlds.setdefault(_default_group(), _World())


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there are DTensors, and torch.distributed has been shut down")
    return group


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return _sent(torch.tensor(places, dtype=torch.int64, device="cpu"), device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy waits for the device
    return tensor.to(device, non_blocking=True)
