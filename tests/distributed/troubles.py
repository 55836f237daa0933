"""What is wrong on one rank only: jobs for ranks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastclip
from fastclip import GradClipper
from tests.distributed import layouts
from tests.distributed.layouts import Named
from tests.distributed.models import grad_of

SILENT = 50.0  # seconds that a rank which hangs waits at most for the others to give up

GONE = "gone"  # what it leaves if it does not wait any longer

CALLS: dict[str, Callable[[Named], Any]] = {
    "clip_grad_norm_": lambda named: fastclip.clip_grad_norm_(named, 1.0),
    "clip_grad_norm_ or error": lambda named: fastclip.clip_grad_norm_(named, 1.0, 2.0, True),
    "get_total_norm": lambda named: fastclip.get_total_norm(
        [(name, grad_of(parameter)) for name, parameter in named]
    ),
    "grad_stats": fastclip.grad_stats,
    "measure": lambda named: GradClipper(named, 1.0).measure(),
    "clip_": lambda named: GradClipper(named, 1.0).clip_(),
    "step": lambda named: GradClipper(named, 1.0).step(sgd(named)),
}


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, foreach=False)


def rows(seed: int, *shape: int) -> nn.Parameter:
    """Sharded over all ranks, with a gradient."""
    over = layouts.mesh(dist.get_world_size())
    parameter = nn.Parameter(distribute_tensor(layouts.normal(seed, *shape), over, [Shard(0)]))
    parameter.grad = distribute_tensor(layouts.normal(seed + 1, *shape), over, [Shard(0)])
    return parameter


def integers() -> Tensor:
    odd = torch.ones(3, 3, dtype=torch.int64)
    odd.grad = torch.ones(3, 3, dtype=torch.int64)
    return odd


def overlapping() -> Tensor:
    odd = torch.zeros(3, 3, requires_grad=True)
    odd.grad = torch.ones(5).as_strided((3, 3), (1, 1))
    return odd


def sound(kind: str) -> Tensor:
    if kind == "overlapping-shard":
        return rows(3, 3 * dist.get_world_size(), 3)
    plain = torch.zeros(3, 3, requires_grad=True)
    plain.grad = torch.ones(3, 3)
    return plain


def spoiled(kind: str, odd: Tensor) -> Tensor:
    """What the guilty rank has in its place."""
    if kind == "integers":
        return integers()
    if kind == "overlapping":
        return overlapping()
    grad, local = grad_of(odd), torch.ones(5).as_strided((3, 3), (1, 1))
    assert isinstance(grad, DTensor)
    odd.grad = DTensor.from_local(
        local, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride()
    )
    return odd


def odd_on_one(kind: str, guilty: int) -> dict[str, tuple[str, str, bool]]:
    """By call: the kind of error and its text, and whether a gradient was changed."""
    answers = {}
    for name, call in CALLS.items():
        odd = sound(kind)
        if dist.get_rank() == guilty:
            odd = spoiled(kind, odd)
        first = rows(1, 5, 2)
        before = layouts.local(grad_of(first)).clone()
        error: Exception | None = None
        try:
            call([("first", first), ("odd", odd)])
        except (TypeError, RuntimeError) as caught:
            error = caught
        changed = not torch.equal(layouts.local(grad_of(first)), before)
        answers[name] = (type(error).__name__, str(error), changed)
    # and nobody is out of step with the others now
    total = fastclip.clip_grad_norm_([rows(1, 5, 2)], 1.0)
    answers["afterwards"] = ("", repr(total.item()), False)
    return answers


def without_gradients(guilty: int, names: list[str] | None) -> dict[str, Any]:
    """By call: the norm, the names, and each rank's own norm, where the guilty rank has none of
    these gradients (None: of any); under "expected" the norm of the elements that are left."""
    answers: dict[str, Any] = {}
    for name, call in CALLS.items():
        if name == "get_total_norm":  # which knows no parameters
            continue
        named: Named = [("a", rows(1, 9, 2)), ("b", rows(3, 8)), ("c", rows(5, 4, 3))]
        if dist.get_rank() == guilty:
            for key, parameter in named:
                if names is None or key in names:
                    parameter.grad = None
        own = [
            layouts.local(parameter.grad).double().square().sum()
            for _, parameter in named
            if parameter.grad is not None
        ]
        mine = torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64)
        squares = mine.clone()
        dist.all_reduce(squares)
        answers["expected"] = squares.sqrt().item(), mine.sqrt().item()
        result = call(named)
        if isinstance(result, Tensor):
            answers[name] = (result.item(), None, None)
        else:
            norms = [each.norm for each in result.by_rank()]
            answers[name] = (result.total_norm.item(), result.names, norms)
        assert all(
            (p.grad is None) == (dist.get_rank() == guilty and (names is None or k in names))
            for k, p in named
        )
    return answers


def none_anywhere() -> dict[str, float]:
    """By call: the norm where no rank has a gradient."""
    answers = {}
    for name, call in CALLS.items():
        if name == "get_total_norm":
            continue
        parameter = rows(1, 9, 2)
        parameter.grad = None
        result = call([("a", parameter)])
        answers[name] = float(result if isinstance(result, Tensor) else result.total_norm)
    return answers


def other_plain_tensors(guilty: int) -> tuple[str, str]:
    """The error where one rank passes another plain tensor beside DTensors than the others. (More
    of them would be tables of another size, at which gloo ends the process.)"""
    plain = torch.zeros(3, requires_grad=True)
    plain.grad = torch.ones(3)
    name = "mine" if dist.get_rank() == guilty else "theirs"
    try:
        fastclip.clip_grad_norm_([("rows", rows(1, 9, 2)), (name, plain)], 1.0)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def not_linear() -> tuple[str, str]:
    """The error for a partial gradient that is a maximum, and that of clamping a partial sum."""
    from torch.distributed.tensor import Partial

    over, texts = layouts.mesh(dist.get_world_size()), []
    for placement in (Partial("max"), Partial()):
        odd = nn.Parameter(distribute_tensor(torch.zeros(3), over, [Replicate()]))
        odd.grad = DTensor.from_local(torch.ones(3), over, [placement])
        linear = placement.reduce_op == "sum"
        call = fastclip.clip_grad_value_ if linear else fastclip.clip_grad_norm_
        try:
            call([("rows", rows(1, 9, 2)), ("odd", odd)], 1.0)
        except TypeError as error:
            texts.append(str(error))
    return texts[0], texts[1]


def interrupted(
    how: str, guilty: int, at: int, grouped: bool, folder: Path
) -> tuple[int, str, bool]:
    """How many steps were taken, the error, and whether a rank which hangs was still there then,
    when a rank is lost before its step `at`. No other communication than the clipper's goes on."""
    named: Named = [("a", rows(1, 9, 2)), ("b", rows(3, 8))]
    options: dict[str, Any] = {}
    if grouped:
        plain = torch.zeros(4, requires_grad=True)
        plain.grad = torch.ones(4)
        named = [(f"own.{dist.get_rank()}", plain)]
        options["process_group"] = dist.group.WORLD
    clipper, optimizer = GradClipper(named, 1.0, **options), sgd(named)
    for number in range(at + 20):
        if number == at and dist.get_rank() == guilty:
            if how == "exit":
                os._exit(1)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + SILENT
            while len([*folder.iterdir()]) < dist.get_world_size() - 1:
                if time.monotonic() > deadline:
                    (folder / GONE).touch()
                    break
                time.sleep(0.05)
            os._exit(1)
        try:
            clipper.step(optimizer)
        except RuntimeError as error:
            was_there = not (folder / GONE).exists()
            (folder / f"rank {dist.get_rank()}").touch()
            return number, str(error), was_there
    return at + 20, "", False
