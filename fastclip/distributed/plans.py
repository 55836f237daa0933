"""Which processes exchange what: the collectives that a list of gradients takes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip.distributed import combine
from fastclip.distributed.combine import COUNTED, OWNER, PRESENT, Gathered, Weights, said
from fastclip.distributed.layouts import Layout, World, default_group, world


class OnDevice(NamedTuple):
    """What a collective needs there at every step."""

    members: Tensor  # int64
    packed: Tensor  # what is sent, with all members present and nothing in their rows


class Gathering(NamedTuple):
    """One collective: the processes, and the places of a list whose rows it combines."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: the default one, which no cache may keep alive
    members: list[int]
    flags: list[int]  # of members that are present
    on_device: dict[torch.device, OnDevice]
    weights: list[Weights]  # of the last step on the CPU, if any


def planned(layouts: Sequence[Layout | None], alone: bool, kept: World) -> list[Gathering]:
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
        ranks: Gathering(ranks, _group(layout, kept), [], [], {}, [])
        for ranks, layout in firsts.items()
        if len(ranks) > 1 and (alone or not any(set(ranks) < set(other) for other in firsts))
    }
    if not plan:  # a process outside all the meshes
        return []
    largest = max(plan.values(), key=lambda gathering: len(gathering.ranks))
    for place, layout in enumerate(layouts):
        ranks = (dist.get_rank(),) if layout is None else layout.ranks
        whole = set(ranks if layout is None else layout.of_mesh)
        hosts = [gathering for gathering in plan.values() if whole <= set(gathering.ranks)]
        if alone:
            hosts = [gathering for gathering in hosts if layout and ranks == gathering.ranks]
        if not hosts:
            continue
        host = largest if layout is None else plan.get(ranks, hosts[0])
        host.members.append(place)
        counted = layout is None or layout.counted
        host.flags.append(PRESENT + COUNTED * counted + OWNER * (1 + min(ranks, default=-1)))
    return list(plan.values())


def first_stray(
    layouts: Sequence[Layout | None], plan: Sequence[Gathering]
) -> tuple[int, str] | None:
    """The first place of which this process would never hear, and what is wrong with that."""
    hosted = {place for gathering in plan for place in gathering.members}
    for place, layout in enumerate(layouts):
        if layout is not None and place not in hosted and len(layout.of_mesh) > 1:
            return place, (
                f" is a DTensor on a mesh of {said(layout.of_mesh)}, which rank {dist.get_rank()} "
                "is not one of, and no mesh of the list has them all: every process would have "
                "another total norm. Take a GradClipper with a process_group of all ranks"
            )
    return None


def meet(plan: Sequence[Gathering], checksum: int, what: str, error: str | None) -> None:
    """The members of each collective tell each other what they are about to exchange, once.

    Raises `RuntimeError` on all that hear of lists which differ, or of a process with an `error`
    of its own, which raises it; what is wrong in one collective is passed on in the next.
    """
    met = world().met
    heard = 0 if error is None else dist.get_rank() + 1  # one over a rank in trouble
    for gathering in plan:
        known = (gathering.ranks, len(gathering.members), checksum)
        if known in met and not heard:
            continue
        every = combine.told([*known[1:], heard], gathering.group or default_group())
        ranks = dist.get_process_group_ranks(gathering.group or default_group())
        for rank, (*own, trouble) in zip(ranks, every, strict=True):
            if trouble:
                heard = heard or trouble
                error = error or (
                    f"rank {trouble - 1} has another list of gradients than other ranks, or one on "
                    "meshes that do not go together, and says more"
                )
            elif own != every[0][:-1]:
                heard = heard or rank + 1
                error = error or f"{what}, but rank {rank} has others than rank {ranks[0]}"
        if not heard:
            met.add(known)
    if error is not None:
        raise RuntimeError(f"{error}. No gradient has been changed")


def weights_of(gathering: Gathering, gathered: Gathered) -> Weights:
    """Those of the last step while the flags are the same, if to compare them is not to wait."""
    if gathered.flags.device.type != "cpu":
        return gathered.weights()
    if not gathering.weights or not torch.equal(gathering.weights[0].flags, gathered.flags):
        gathering.weights[:] = [gathered.weights()]
    return gathering.weights[0]


def _group(layout: Layout, kept: World) -> dist.ProcessGroup | None:
    """The process group of all processes of a mesh."""
    ranks = layout.ranks
    if len(ranks) == dist.get_world_size():
        if layout.mesh.ndim > 1 or layout.mesh.get_group() is default_group():
            return None
    if layout.mesh.ndim == 1:
        group = layout.mesh.get_group()
        kept.in_use.append(group)
        return group
    if ranks not in kept.groups:
        # Made by its members alone: the others may have no such mesh.
        backend = default_group()._get_backend(torch.device(layout.mesh.device_type))
        timeout = backend.options._timeout  # the job's; without it half an hour
        group = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
        kept.groups[ranks] = group
        kept.in_use.append(group)
    return kept.groups[ranks]


def index(places: Sequence[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(places, dtype=torch.int64, device="cpu"), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy waits for the device
    return tensor.to(device, non_blocking=True)
