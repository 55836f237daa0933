"""What is communicated, as the profiler sees it: jobs for ranks."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastclip
from fastclip import GradClipper
from tests.distributed import layouts, models
from tests.distributed.layouts import Named
from tests.distributed.models import grad_of

Sent = list[tuple[str, int]]  # of each collective the operator, and elements of its largest tensor


def sent(call: Callable[[], Any]) -> Sent:
    """The collectives of a call."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    return [
        (event.name, max(prod(shape) for shape in event.input_shapes))
        for event in profiled.events()
        if event.name.startswith("c10d::")
    ]


def calls(named: Named, **options: Any) -> dict[str, Callable[[], Any]]:
    """Everything that can be done with the gradients, once."""
    parameters = [parameter for _, parameter in named]
    clipper = GradClipper(named, 1.0, **options)
    strict = GradClipper(named, 1.0, nonfinite="error", **options)
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    of_clipper: dict[str, Callable[[], Any]] = {
        "clip_": clipper.clip_,
        "clip_ or error": strict.clip_,
        "measure": clipper.measure,
        "step": lambda: clipper.step(optimizer),
    }
    if options:
        return of_clipper
    grads = [grad_of(parameter) for parameter in parameters]
    return of_clipper | {
        "clip_grad_norm_": lambda: fastclip.clip_grad_norm_(parameters, 1.0),
        "clip_grad_norm_ or error": lambda: fastclip.clip_grad_norm_(parameters, 1.0, 2.0, True),
        "get_total_norm": lambda: fastclip.get_total_norm(grads),
        "clip_grads_with_norm_": lambda: fastclip.clip_grads_with_norm_(parameters, 1.0, 7.0),
        "grad_stats": lambda: fastclip.grad_stats(named),
        "by_rank": fastclip.grad_stats(named).by_rank,
    }


def of_calls(named: Named, **options: Any) -> dict[str, Sent]:
    """After each has been called once: groups are made at the first call."""
    answers = {}
    for name, call in calls(named, **options).items():
        call()
        answers[name] = sent(call)
    return answers


def of_layout(name: str, size: int) -> tuple[int, dict[str, Sent]]:
    named = layouts.build(name, size)
    return len(named), of_calls(named)


def of_many(size: int, count: int) -> dict[str, Sent]:
    over = layouts.mesh(size)
    shard = [layouts.Shard(0)]
    return of_calls([(f"w{n}", layouts.placed(n, over, shard, 64, 64)) for n in range(count)])


def of_groups() -> dict[str, Sent]:
    """Two groups, of four stages."""
    own = nn.Parameter(torch.zeros(1000))
    own.grad = torch.ones(1000)
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return of_calls([(f"stage.{dist.get_rank()}", own)], process_group=[pairs, across])


def of_ddp(size: int) -> tuple[dict[str, Sent], float]:
    """And the norm."""
    model = DistributedDataParallel(models.net())
    models.loss(model, models.part(0, dist.get_rank(), size)).backward()
    named = list(model.module.named_parameters())
    total = fastclip.get_total_norm([grad_of(parameter) for _, parameter in named])
    return of_calls(named), total.item()
