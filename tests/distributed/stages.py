"""Models that are split by hand, with the communication that their users write: jobs for ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fastclip
from fastclip import GradClipper
from tests.distributed import layouts
from tests.distributed.layouts import normal
from tests.distributed.measuring import norm

Tensors = dict[str, Tensor]
Part = tuple[slice, ...]

WIDTH, HIDDEN, TOKENS = 6, 8, 7
SHAPES = {
    "embed": (TOKENS, WIDTH),
    "up": (HIDDEN, WIDTH),
    "up_bias": (HIDDEN,),
    "down": (WIDTH, HIDDEN),
    "scale": (WIDTH,),
}
INPUT = torch.tensor([0, 2, 3, 5, 1, 2, 0, 6])


class Copied(torch.autograd.Function):
    """Of what all ranks have: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """Over the ranks; each summand's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Split(NamedTuple):
    """What a rank holds after backward, and which part that is of the whole."""

    own: Tensors
    parts: dict[str, Part]
    counted: dict[str, bool]


class Outcome(NamedTuple):
    """Of one norm type on one rank."""

    p: float
    limit: float
    total: Tensor
    layers: list[Any]
    after: dict[str, Tensor | None]


class Report(NamedTuple):
    whole: dict[str, Tensor | None]  # gradients in one process
    parts: dict[str, Part]
    outcomes: list[Outcome]


def weights(experts: int = 0) -> Tensors:
    """The same everywhere."""
    shapes = dict(SHAPES)
    for number in range(experts):
        shapes[f"expert.{number}"] = (WIDTH, WIDTH)
    made = enumerate(shapes.items())
    return {name: normal(n, *shape).requires_grad_() for n, (name, shape) in made}


def bottom(w: Tensors) -> Tensor:
    return (w["embed"][INPUT] @ w["up"].T + w["up_bias"]).relu()


def top(w: Tensors, hidden: Tensor) -> Tensor:
    """The loss, with the embedding for an output layer too."""
    scores = ((hidden @ w["down"].T) * w["scale"]) @ w["embed"].T
    return nn.functional.cross_entropy(scores, INPUT.roll(1))


def pipeline() -> tuple[dict[str, Tensor | None], Split]:
    """Two stages, both with the embedding, whose gradient is summed over them."""
    w = weights()
    top(w, bottom(w)).backward()
    whole = {name: weight.grad for name, weight in w.items()}
    mine = weights()
    if dist.get_rank() == 0:
        names = ["embed", "up", "up_bias"]
        hidden = bottom(mine)
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)
    else:
        names = ["down", "scale", "embed"]
        hidden = torch.empty(len(INPUT), HIDDEN)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        top(mine, hidden).backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, 0)
    dist.all_reduce(mine["embed"].grad)
    counted = {name: name != "embed" or dist.get_rank() == 0 for name in names}
    return whole, Split({name: mine[name] for name in names}, {}, counted)


def tensor_parallel() -> tuple[dict[str, Tensor | None], Split]:
    """Rows of `up`, columns of `down`, the rest everywhere, as Megatron has it."""
    w = weights()
    top(w, bottom(w)).backward()
    whole = {name: weight.grad for name, weight in w.items()}
    size, rank = dist.get_world_size(), dist.get_rank()
    some, every = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size), slice(None)
    parts: dict[str, Part] = {"up": (some,), "up_bias": (some,), "down": (every, some)}
    mine = {
        name: weight.detach()[parts.get(name, (every,))].clone().requires_grad_()
        for name, weight in weights().items()
    }
    hidden = (Copied.apply(mine["embed"][INPUT]) @ mine["up"].T + mine["up_bias"]).relu()
    scores = (Summed.apply(hidden @ mine["down"].T) * mine["scale"]) @ mine["embed"].T
    nn.functional.cross_entropy(scores, INPUT.roll(1)).backward()
    return whole, Split(mine, parts, {name: name in parts or rank == 0 for name in mine})


def experts() -> tuple[dict[str, Tensor | None], Split]:
    """Each rank has one expert, and one of these gets no tokens; the rest is everywhere."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def mixed(w: Tensors, wanted: Sequence[int]) -> Tensor:
        hidden = torch.zeros(len(INPUT), WIDTH)
        routed = INPUT % (size - 1)
        for number in wanted:
            tokens = (routed == number).nonzero().flatten()
            if len(tokens):
                sources = Copied.apply(w["embed"]) if len(wanted) == 1 else w["embed"]
                out = sources[INPUT[tokens]] @ w[f"expert.{number}"]
                hidden = hidden.index_add(0, tokens, out)
            elif len(wanted) == 1:
                hidden = hidden + 0 * Copied.apply(w["embed"])[INPUT]
        return hidden

    def end(w: Tensors, hidden: Tensor) -> Tensor:
        return nn.functional.cross_entropy((hidden * w["scale"]) @ w["embed"].T, INPUT.roll(1))

    w = weights(size)
    end(w, mixed(w, range(size))).backward()
    mine = weights(size)
    end(mine, Summed.apply(mixed(mine, [rank]))).backward()
    names = ["embed", f"expert.{rank}", "scale"]
    whole = {n: weight.grad for n, weight in w.items() if n in names or n.startswith("expert.")}
    counted = {name: name.startswith("expert.") or rank == 0 for name in names}
    return whole, Split({name: mine[name] for name in names}, {}, counted)


SPLITS: dict[str, Callable[[], tuple[dict[str, Tensor | None], Split]]] = {
    "pipeline": pipeline,
    "tensor-parallel": tensor_parallel,
    "experts": experts,
}


def report(name: str, norm_types: Sequence[float], backend: str) -> Report:
    """`clip_` in every norm."""
    whole, (own, parts, counted) = SPLITS[name]()
    saved = {key: None if w.grad is None else w.grad.clone() for key, w in own.items()}
    there = [grad for grad in whole.values() if grad is not None]
    outcomes = []
    for p in norm_types:
        limit = 0.4 * norm(there, p)
        with fastclip.backend(backend):
            clipper = GradClipper(
                own.items(),
                limit,
                norm_type=p,
                process_group=dist.group.WORLD,
                counts=lambda key, _: counted[key],
            )
            for key, weight in own.items():
                grad = saved[key]
                weight.grad = None if grad is None else grad.clone()
            stats = clipper.clip_()
        after = {key: weight.grad for key, weight in own.items()}
        outcomes.append(Outcome(p, limit, stats.total_norm, stats.layers(), after))
    return Report(whole, parts, outcomes)


def sharded_pipeline(guilty: int | None) -> dict[str, Any]:
    """Two stages, each sharded by DTensor over two ranks: meshes first, then the process group."""
    over = layouts.mesh(2, 2, names=("pp", "dp"))
    stage, names = over["pp"].get_local_rank(), ("a", "b", "c")
    shapes = {"a": (5, 3), "b": (1, 4), "c": (6,)}
    every = {
        f"{n}.{name}": normal(100 * n + 10 * k + 1, *shapes[name])
        for n in range(2)
        for k, name in enumerate(names)
    }
    named = [
        (
            f"{stage}.{name}",
            layouts.placed(100 * stage + 10 * k, over["dp"], [Shard(0)], *shapes[name]),
        )
        for k, name in enumerate(names)
    ]
    if dist.get_rank() == guilty:
        layouts.local(dict(named)[f"{stage}.a"].grad).view(-1)[0] = math.nan  # type: ignore[arg-type]
    clipper = GradClipper(named, 1.0, process_group=over["pp"].get_group())
    stats = clipper.clip_()
    return {
        "total": stats.total_norm.item(),
        "expected": norm(every.values(), 2.0),
        "skipped": bool(stats.skipped),
        "numel": dict(zip(stats.names, stats.numel, strict=True)),
        "expected numel": {name: grad.numel() for name, grad in every.items()},
        "nonfinite": stats.nonfinite(),
        "after": {key: layouts.whole(p.grad) for key, p in named},  # type: ignore[arg-type]
        "before": every,
    }
