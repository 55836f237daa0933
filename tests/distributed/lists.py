"""Lists of gradients that ranks do not have in common: jobs for ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastclip
from tests.distributed.layouts import Named
from tests.distributed.models import grad_of
from tests.distributed.troubles import rows


def error_of(named: Named, gradients: bool = False) -> str:
    try:
        if gradients:
            grads = [(name, parameter.grad) for name, parameter in named]
            fastclip.get_total_norm(grads)  # type: ignore[arg-type]
        else:
            fastclip.clip_grad_norm_(named, 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def different(kind: str) -> tuple[str, float]:
    """The error where the list of rank 1 is another from the start; and a norm afterwards."""
    me = dist.get_rank()
    named: Named = [("a", rows(1, 8, 2)), ("b", rows(3, 8, 2))]
    odd, more, short = named[1][1], rows(5, 4), rows(3, 4, 2)  # to make them is a collective
    grad = grad_of(odd)
    assert isinstance(grad, DTensor)
    whole = nn.Parameter(grad.redistribute(placements=[Replicate()]))
    whole.grad = whole.detach().clone()
    if me == 1 and kind == "more":
        named.append(("c", more))
    elif me == 1 and kind == "frozen":
        odd.requires_grad_(False)
        odd.grad = None
    elif me == 1 and kind == "none":
        odd.grad = None
    elif me == 1 and kind == "plain":
        plain = nn.Parameter(torch.zeros(3))
        plain.grad = torch.ones(3)
        named.append(("c", plain))
    elif me == 1 and kind == "shape":
        named[1] = ("b", short)
    elif me == 1 and kind == "placements":
        named[1] = ("b", whole)
    text = error_of(list(named), gradients=kind == "none")
    return text, fastclip.clip_grad_norm_([rows(1, 5, 2)], 1.0).item()


def on(ranks: list[int]) -> Tensor:
    """A shard of ones on a mesh of these ranks, of which this one may be none."""
    mesh = DeviceMesh("cpu", ranks)
    there = dist.get_rank() in ranks
    made = nn.Parameter(DTensor.from_local(torch.ones(2 if there else 0), mesh, [Shard(0)]))
    made.grad = DTensor.from_local(torch.ones(2 if there else 0), mesh, [Shard(0)])
    return made


def on_meshes(meshes: list[list[int]]) -> str:
    return error_of([(f"on {ranks}", on(ranks)) for ranks in meshes])


def gone() -> list[str]:
    """The errors of a clipper whose group has been destroyed, and of a mesh instead of a group."""
    own = nn.Parameter(torch.zeros(3))
    own.grad = torch.ones(3)
    named = [("a", own)]
    group = dist.new_group([0, 1])
    clipper = fastclip.GradClipper(named, 1.0, process_group=group)
    clipper.clip_()
    dist.destroy_process_group(group)
    texts = []
    try:
        clipper.clip_()
    except RuntimeError as error:
        texts.append(str(error))
    try:
        mesh: Any = DeviceMesh("cpu", [0, 1])
        fastclip.GradClipper(named, 1.0, process_group=mesh)
    except TypeError as error:
        texts.append(str(error))
    return texts
