"""Gradients that are not finite on one rank: jobs for ranks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fastclip
from fastclip import GradClipper
from tests import training
from tests.distributed import layouts
from tests.distributed.layouts import Named
from tests.distributed.measuring import held_grads, held_values
from tests.distributed.models import grad_of

Guilty = int | tuple[int, ...]


class Spoiled(NamedTuple):
    """Of one rank, after one call on spoiled gradients."""

    fault: str  # what it raised
    skipped: bool | None
    found_inf: float | None
    total: float | None
    nonfinite: list[str]  # names of layers
    counts: dict[str, tuple[int, int]]  # of those: NaN, inf
    by_rank: list[Any]
    printed: str
    changed: list[str]  # parameters and states that are not as they were, in words
    rewritten: list[str]  # gradients, likewise
    grads: dict[str, Tensor]  # what this rank holds, afterwards
    counters: tuple[int, ...]


def step(
    layout: str, size: int, guilty: Guilty, name: str, value: float, policy: Any, **options: Any
) -> Spoiled:
    """`GradClipper.step` of AdamW, after one good step."""
    named, optimizer, clipper = begun(layout, size, policy, **options)
    spoil(named, guilty, name, value)
    return watched(named, optimizer, clipper, lambda: clipper.step(optimizer))


def clip(
    layout: str, size: int, guilty: Guilty, name: str, value: float, policy: Any, **options: Any
) -> Spoiled:
    """`GradClipper.clip_`, likewise."""
    named, optimizer, clipper = begun(layout, size, policy, **options)
    spoil(named, guilty, name, value)
    return watched(named, optimizer, clipper, clipper.clip_)


def function(
    layout: str, size: int, guilty: int, name: str, value: float, called: str, raises: bool
) -> Spoiled:
    """One of the functions, with `error_if_nonfinite` as `raises`."""
    named, optimizer, clipper = begun(layout, size, "skip")
    spoil(named, guilty, name, value)
    calls = {
        "clip_grad_norm_": lambda: fastclip.clip_grad_norm_(named, 1.0, 2.0, raises),
        "get_total_norm": lambda: fastclip.get_total_norm(
            [(key, grad_of(parameter)) for key, parameter in named], 2.0, raises
        ),
        "grad_stats": lambda: fastclip.grad_stats(named),
    }
    return watched(named, optimizer, clipper, calls[called])


def recovered(layout: str, size: int, guilty: int, name: str) -> tuple[bool, list[str], bool]:
    """Whether a spoiled step is skipped, what differs after the next one from a run in which the
    spoiled one had not been, and whether anything moved."""
    ends = []
    for spoiled in (True, False):
        named, optimizer, clipper = begun(layout, size, "skip")
        good, values = held_grads(named), held_values(named)
        skipped = False
        if spoiled:
            spoil(named, guilty, name, math.nan)
            skipped = bool(clipper.step(optimizer).skipped)
            for key, parameter in named:
                layouts.local(grad_of(parameter)).copy_(good[key])
        clipper.step(optimizer)
        ends.append((skipped, state(named, optimizer)))
    moved = bool(training.differences(values, held_values(named)))
    return ends[0][0], training.differences(ends[0][1], ends[1][1]), moved


def begun(
    layout: str, size: int, policy: Any, fused: bool = True, **options: Any
) -> tuple[Named, torch.optim.Optimizer, GradClipper]:
    """A layout after one good step, with its gradients as they were before that."""
    named = layouts.build(layout, size)
    saved = held_grads(named)
    parameters = [parameter for _, parameter in named]
    mode = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.AdamW(parameters, lr=0.01, **mode)  # type: ignore[arg-type]
    clipper = GradClipper(named, 1.0, nonfinite=policy, **options)
    clipper.step(optimizer)
    for key, parameter in named:
        layouts.local(grad_of(parameter)).copy_(saved[key])
    return named, optimizer, clipper


def spoil(named: Named, guilty: Guilty, name: str, value: float) -> None:
    """Put `value` first in what the guilty rank holds of a gradient, or each of several."""
    if dist.get_rank() in ((guilty,) if isinstance(guilty, int) else guilty):
        layouts.local(grad_of(dict(named)[name])).view(-1)[0] = value


def watched(
    named: Named, optimizer: torch.optim.Optimizer, clipper: GradClipper, call: Callable[[], Any]
) -> Spoiled:
    before, grads = state(named, optimizer), held_grads(named)
    fault, said = "", None
    try:
        said = call()
    except RuntimeError as error:
        fault = str(error)
    changed = training.differences(before, state(named, optimizer))
    rewritten = training.differences(grads, held_grads(named))
    ends = (changed, rewritten, held_grads(named), training.counted(clipper))
    if not isinstance(said, fastclip.GradStats):
        total = None if said is None else float(said)
        return Spoiled(fault, None, None, total, [], {}, [], "", *ends)
    bad = {each.name: (each.nan, each.inf) for each in said.layers() if each.nan or each.inf}
    return Spoiled(
        *(fault, bool(said.skipped), float(said.found_inf), float(said.total_norm)),
        *(said.nonfinite(), bad, [tuple(each) for each in said.by_rank()], str(said)),
        *ends,
    )


def state(named: Named, optimizer: torch.optim.Optimizer) -> Any:
    """What this rank holds of parameters and optimizer state."""
    moments = [
        {key: layouts.local(value).clone() for key, value in optimizer.state[parameter].items()}
        for _, parameter in named
    ]
    return {"values": held_values(named), "moments": moments}
