"""Random shapes, placements and meshes: a job for ranks."""

import math
import random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import fastclip
from fastclip import GradClipper
from tests.distributed import layouts
from tests.distributed.layouts import Named
from tests.distributed.measuring import is_partial, norm
from tests.distributed.models import grad_of

NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf, 0.0)


class Failed(NamedTuple):
    """An example that went wrong."""

    example: int
    described: list[str]
    what: str


def drawn(
    choose: random.Random, example: int, over: DeviceMesh, position: int
) -> tuple[str, Tensor]:
    """A tensor of up to three dimensions of up to nine, empty ones among them, placed somehow."""
    shape = tuple(choose.choice([0, 1, 2, 3, 5, 9]) for _ in range(choose.randrange(4)))
    placements: list[Placement] = []
    for _ in range(over.ndim):
        free = [dim for dim in range(len(shape)) if Shard(dim) not in placements]
        kinds: list[Placement] = [Replicate(), Partial(), *map(Shard, free), *map(Shard, free)]
        placements.append(choose.choice(kinds))
    return f"p{position}", layouts.placed(1000 * example + 20 * position, over, placements, *shape)


def listed(choose: random.Random, example: int, meshes: list[DeviceMesh]) -> Named:
    """Up to five of them, plain tensors too."""
    named: Named = []
    for position in range(choose.randint(1, 5)):
        if choose.random() < 0.2:
            plain = torch.zeros(3, requires_grad=True)
            plain.grad = layouts.normal(1000 * example + 20 * position, 3)
            named.append((f"p{position}", plain))
        else:
            named.append(drawn(choose, example, choose.choice(meshes), position))
    return named


def faults(named: Named, p: float) -> list[str]:
    """What is wrong with the norm, a layer's numbers, or clipped gradients."""
    whole = {key: layouts.whole(grad_of(parameter)) for key, parameter in named}
    held = {key: layouts.local(grad_of(parameter)).clone() for key, parameter in named}
    partial = {key for key, parameter in named if is_partial(grad_of(parameter))}
    expected = norm(whole.values(), p) if any(map(Tensor.numel, whole.values())) else 0.0
    stats = fastclip.grad_stats(named, p)
    limit = 0.5 * expected
    clipped = GradClipper(named, limit, norm_type=p).clip_()
    found = []
    for what, total in (("grad_stats", stats.total_norm), ("clip_", clipped.total_norm)):
        # a power of 1/p passes on what p has lost
        if not math.isclose(total.item(), expected, rel_tol=4e-6, abs_tol=0.0):
            found.append(f"{what}: {total.item()} is not {expected}")
    for layer in stats.layers():
        grad = whole[layer.name]
        zeros = int((grad == 0).sum())
        largest = float(grad.abs().max()) if grad.numel() else 0.0
        off = 0.0 if layer.name not in partial else 1e-6
        if (layer.numel, layer.nan, layer.inf, layer.zero) != (grad.numel(), 0, 0, zeros):
            found.append(f"{layer}: {grad.numel()} elements, {zeros} zeros")
        if not math.isclose(layer.max_abs, largest, rel_tol=off, abs_tol=0.0):
            found.append(f"{layer}: the largest is {largest}")
    coef = min(1.0, limit / (expected + 1e-6))
    for key, parameter in named:
        now, wanted = layouts.local(grad_of(parameter)).double(), held[key].double() * coef
        if not torch.allclose(now, wanted, rtol=1e-6, atol=0.0):
            found.append(f"{key} is not what it was times {coef}")
    return found


def examples(size: int, count: int, seed: int) -> tuple[list[Failed], list[float]]:
    """Those that failed, and the norms of all."""
    choose = random.Random(seed)  # every rank draws the same
    two = layouts.mesh(2, size // 2, names=("a", "b"))
    meshes = [layouts.mesh(size), two, two["a"], two["b"]]
    failed, norms = [], []
    for example in range(count):
        named = listed(choose, example, meshes)
        p = choose.choice(NORM_TYPES)
        norms.append(fastclip.clip_grad_norm_(named, math.inf, p).item())
        grads = [(key, grad_of(parameter)) for key, parameter in named]
        described = [f"{key}: {tuple(x.shape)} {getattr(x, 'placements', '')}" for key, x in grads]
        found = faults(named, p)
        failed += [Failed(example, described, f"p={p}, rank {dist.get_rank()}: {f}") for f in found]
    return failed, norms
