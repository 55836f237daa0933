"""How DTensors are laid out over processes. Every use of what DTensor keeps private is here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

if TYPE_CHECKING:
    from fastclip.distributed.lists import Known

LINEAR = frozenset({"sum", "avg"})  # kinds of Partial that a coefficient passes through

Placements = tuple[Placement, ...]
Key = tuple[DeviceMesh, tuple[str, ...], Placements]  # equal meshes may have other groups

_FACTS = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")


class Layout(NamedTuple):
    """Where the elements of DTensors of one mesh and the same placements are."""

    mesh: DeviceMesh
    placements: Placements
    ranks: tuple[int, ...]  # of the mesh, sorted; none where this process is not one of them
    of_mesh: tuple[int, ...]  # the same, there too
    counted: bool  # whether the part of this process is, or is a replica of one that is
    reduced: Placements | None  # in which a partial gradient is measured
    divisor: int  # what its sum is divided by


class PartialOf(NamedTuple):
    """What it takes to reduce a partial gradient."""

    layout: Layout
    local: torch.Size
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass
class World:
    """What is kept for as long as the default process group."""

    # None: of partial ones, which are by number of dimensions as well
    layouts: dict[Key, Layout | None] = field(default_factory=dict)
    partial: dict[tuple[Key, int], Layout] = field(default_factory=dict)
    lists: "list[Known]" = field(default_factory=list)  # the last one used first
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    in_use: list[dist.ProcessGroup] = field(default_factory=list)  # those and the meshes' own
    # ranks, rows and checksums that the ranks have told each other of
    met: set[tuple[tuple[int, ...], int, int]] = field(default_factory=set)


_worlds: "WeakKeyDictionary[dist.ProcessGroup, World]" = WeakKeyDictionary()


class Layouts:
    """The layouts of the DTensors of a list, of which most are like the one before, down to the
    very objects: then nothing has to be hashed, which takes 2 us."""

    def __init__(self) -> None:
        self._world = world()
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


def _layout(source: DTensor, kept: World) -> Layout | None:
    spec = source._spec
    key = (spec.mesh, _groups(spec.mesh), spec.placements)
    if key not in kept.layouts:
        partial = any(
            placement.is_partial() and spec.mesh.size(dim) > 1
            for dim, placement in enumerate(spec.placements)
        )
        kept.layouts[key] = None if partial else _made(spec.mesh, spec.placements, None)
    layout = kept.layouts[key]
    if layout is not None:
        return layout
    of_dims = (key, source.dim())
    if of_dims not in kept.partial:
        reduced = _reducible(spec.mesh, spec.placements, source.dim())
        if reduced is None:
            return None
        kept.partial[of_dims] = _made(spec.mesh, spec.placements, reduced)
    return kept.partial[of_dims]


def _groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's groups; none where this process is not one of it."""
    return tuple(getattr(mesh, "_dim_group_names", ()))


def _made(mesh: DeviceMesh, placements: Placements, reduced: Placements | None) -> Layout:
    place, divisor = mesh.get_coordinate(), 1
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            divisor *= mesh.size(dim)
    if place is None:
        return Layout(mesh, placements, (), ranks, False, reduced, divisor)
    counted = all(
        number == 0 or not isinstance(placement, Replicate)
        for number, placement in zip(place, reduced or placements, strict=True)
    )
    return Layout(mesh, placements, ranks, ranks, counted, reduced, divisor)


def _reducible(mesh: DeviceMesh, placements: Placements, dims: int) -> Placements | None:
    """The placements with the partial ones reduced: sharded along a dimension that nothing else
    shards, where there is one, else replicated. None if one of them is not linear."""
    ranks = mesh.mesh.flatten().tolist()
    # a reduce-scatter goes by the order of ranks in the group, which then is not the mesh's
    dims = dims if ranks == sorted(ranks) else 0
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


def divided_dim(placement: Placement) -> int | None:
    """The dimension of tensors that is divided between processes, if one is."""
    # is_shard() is false of _StridedShard
    dim: int | None = getattr(placement, "dim", None)
    return dim


def alike(one: Layout | None, other: Layout | None) -> bool:
    """Whether each process has the same elements of tensors so laid out."""
    if one is other or one is None or other is None:
        return one is other
    if one.mesh != other.mesh:
        return False
    pairs = zip(one.placements, other.placements, strict=True)
    return all(mine == their or one.mesh.size(d) == 1 for d, (mine, their) in enumerate(pairs))


def not_linear(what: str, source: DTensor) -> str:
    return (
        f"{what} is a DTensor with placements {source.placements}: partial values that are not "
        "summed or averaged cannot be measured or rescaled before they are reduced"
    )


def reduced_part(stored: Tensor, partial: PartialOf) -> Tensor:
    """A part of the reduced gradient, a copy. A collective."""
    layout = partial.layout
    if not layout.ranks:
        return stored
    # As a sum: gloo has no averages. In at least float32, and divided first, so that what has an
    # average has one here; a sum in bfloat16 is 3e-4 off.
    placements = [Partial() if each.is_partial() else each for each in layout.placements]
    local = stored.detach().to(torch.promote_types(stored.dtype, torch.float32)) / layout.divisor
    whole = DTensor.from_local(
        *(local.expand(partial.local), layout.mesh, placements),
        run_check=False,
        shape=partial.shape,
        stride=partial.stride,
    )
    return local_of(whole.redistribute(layout.mesh, layout.reduced))


def facts_of(sources: Sequence[Tensor | None]) -> list[object]:
    """All that a list's layouts follow from, to be compared with those of another call: objects
    that do not change, and most of which are the same from step to step."""
    facts: list[object] = [
        _FACTS(each) if isinstance(each, DTensor) else None if each is None else each.shape
        for each in sources
    ]
    meshes = {id(fact[0]): fact[0] for fact in facts if type(fact) is tuple}
    return [*facts, *map(_groups, meshes.values())]


def locals_of(sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What this process holds of each, on the same memory."""
    held = [each._local_tensor if isinstance(each, DTensor) else each for each in sources]
    if AsyncCollectiveTensor in set(map(type, held)):
        held = [each.wait() if isinstance(each, AsyncCollectiveTensor) else each for each in held]
    return held


def local_of(source: DTensor) -> Tensor:
    """What this process holds, on the same memory."""
    local = source._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def world() -> World:
    """What is kept; nothing that is of a group which has been destroyed. Two meshes are equal
    though only one has its groups still."""
    group = default_group()
    kept = _worlds.get(group)
    if kept is None or not all(map(_is_there, kept.in_use)):
        groups = {} if kept is None else kept.groups
        groups = {ranks: each for ranks, each in groups.items() if _is_there(each)}
        met = set() if kept is None else kept.met  # as the others have it, who may keep all
        kept = _worlds[group] = World(groups=groups, in_use=[*groups.values()], met=met)
    return kept


def _is_there(group: dist.ProcessGroup) -> bool:
    try:
        return len(dist.get_process_group_ranks(group)) > 0
    except KeyError:
        return False


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there are DTensors, and torch.distributed has been shut down")
    return group
