"""What every function says of, and does to, the gradients of a layout: a job for ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

import fastclip
from fastclip import GradClipper, GradStats, LayerStats
from tests.distributed import layouts
from tests.distributed.layouts import Named
from tests.distributed.models import grad_of

Tensors = dict[str, Tensor]
Said = tuple[Tensor | None, Tensor | None, list[LayerStats] | None]

SHARE = 0.37  # of the norm that clipping leaves
RATE = 0.5


class Outcome(NamedTuple):
    """Of one function on one rank."""

    function: str
    backend: str
    p: float
    limit: float
    total: Tensor | None
    coef: Tensor | None
    layers: list[LayerStats] | None
    after: Tensors  # what this rank holds of the gradients
    moved: Tensors | None  # what a step has taken from what it holds of the parameters, over RATE


class Report(NamedTuple):
    """Of one rank."""

    whole: Tensors  # the gradients
    held: Tensors  # what this rank holds of them
    partial: list[str]  # the names of gradients that are sums still to be made
    outcomes: list[Outcome]


def report(
    name: str, size: int, norm_types: Sequence[float], backends: Sequence[str] = ("cpu",)
) -> Report:
    """Every function on the same gradients of a layout."""
    named = layouts.build(name, size)
    whole = {key: layouts.whole(grad_of(parameter)) for key, parameter in named}
    partial = [key for key, parameter in named if is_partial(grad_of(parameter))]
    held, values = held_grads(named), held_values(named)
    outcomes = []
    for p in norm_types:
        limit = SHARE * norm(whole.values(), p)
        chosen = functions(named, p, limit, layouts.LAYOUTS[name].torch_total, bool(partial))
        for backend in backends:
            for function, call in chosen.items():
                put(named, held, values)
                with fastclip.backend(backend):
                    result = call()
                said: Said = (None, None, None)
                if isinstance(result, GradStats):
                    said = result.total_norm, result.coef, result.layers()
                elif result is not None:
                    said = result, None, None
                after = held_values(named)
                moved = {key: (values[key].double() - after[key].double()) / RATE for key in after}
                steps = moved if function == "step" else None
                outcomes.append(
                    Outcome(function, backend, p, limit, *said, held_grads(named), steps)
                )
    return Report(whole, held, partial, outcomes)


def held_grads(named: Named) -> Tensors:
    return {key: layouts.local(grad_of(parameter)).clone() for key, parameter in named}


def held_values(named: Named) -> Tensors:
    return {key: layouts.local(parameter).detach().clone() for key, parameter in named}


@torch.no_grad()
def put(named: Named, grads: Tensors, values: Tensors) -> None:
    for key, parameter in named:
        layouts.local(grad_of(parameter)).copy_(grads[key])
        layouts.local(parameter).copy_(values[key])


def functions(
    named: Named, p: float, limit: float, torch_total: bool, partial: bool
) -> dict[str, Callable[[], Tensor | GradStats | None]]:
    """By name; each measures or clips the gradients of `named`."""
    parameters = [parameter for _, parameter in named]
    grads = [grad_of(parameter) for parameter in parameters]

    def with_norm(total: Callable[..., Tensor]) -> None:
        fastclip.clip_grads_with_norm_(parameters, limit, total(grads, p))

    def step() -> GradStats:
        # foreach does not take DTensors of several meshes
        optimizer = torch.optim.SGD(parameters, lr=RATE, foreach=False)
        return clipper.step(optimizer)

    clipper = GradClipper(named, limit, norm_type=p)
    chosen: dict[str, Callable[[], Tensor | GradStats | None]] = {
        "clip_grad_norm_": lambda: fastclip.clip_grad_norm_(parameters, limit, p),
        "clip_grad_norm_ or error": lambda: fastclip.clip_grad_norm_(iter(named), limit, p, True),
        "get_total_norm": lambda: fastclip.get_total_norm(grads, p),
        "clip_grads_with_norm_": lambda: with_norm(fastclip.get_total_norm),
        "clip_grads_with_norm_ of torch": lambda: with_norm(torch.nn.utils.get_total_norm),
        "clip_grad_value_": lambda: fastclip.clip_grad_value_(parameters, bound(limit, p)),
        "grad_stats": lambda: fastclip.grad_stats(named, p),
        "measure": clipper.measure,
        "clip_": clipper.clip_,
        "step": step,
    }
    if not torch_total or p == torch.inf:  # torch raises where a shard is empty
        del chosen["clip_grads_with_norm_ of torch"]
    if partial:  # cannot be clamped, and no step is defined
        del chosen["clip_grad_value_"], chosen["step"]
    return chosen


def bound(limit: float, p: float) -> float:
    """What clip_grad_value_ is given: something like the size of an element."""
    return limit if p == torch.inf else limit / 20


def norm(tensors: Any, p: float) -> float:
    """Of all as one vector, in float64."""
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    return float(torch.linalg.vector_norm(flat, p))


def is_partial(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Partial) for placement in tensor.placements
    )
