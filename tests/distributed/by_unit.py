"""Clipping by unit of DTensors: jobs for ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fastclip import GradClipper
from fastclip.rules import AGC, Decision, Measured
from fastclip.rules.contract import State
from tests import training
from tests.distributed import layouts, traffic
from tests.distributed.layouts import Named, placed
from tests.distributed.models import grad_of

FACTOR = 0.3  # between the smallest and the largest of the quotients of norms


class Clipped(NamedTuple):
    """Of one rank; tensors are whole."""

    values: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    coef: list[float]
    threshold: list[float]
    written: bool  # anything of what this rank holds


def by_hand(size: int) -> Named:
    """Units divided along every dimension but the first, and along two; uneven and empty parts."""
    line, two = layouts.mesh(size), layouts.mesh(2, size // 2, names=("a", "b"))
    kinds: dict[str, tuple[Any, list[Placement], tuple[int, ...]]] = {
        "rows": (line, [Shard(0)], (5, 3)),
        "columns": (line, [Shard(1)], (5, 6)),
        "few-columns": (line, [Shard(1)], (3, 1, 2)),
        "last": (line, [Shard(2)], (3, 2, 5)),
        "blocks": (two, [Shard(0), Shard(1)], (3, 5)),
        "swapped-blocks": (two, [Shard(1), Shard(0)], (3, 5)),
        "twice-columns": (two, [Shard(1), Shard(1)], (2, 7)),
        "two-dims": (two, [Shard(2), Shard(1)], (2, 3, 3)),
        "twice-rows": (two, [Shard(0), Shard(0)], (7, 2)),
        "copied-columns": (two, [Replicate(), Shard(1)], (3, 4)),
        "columns-copied": (two, [Shard(1), Replicate()], (3, 4)),
        "vector": (line, [Shard(0)], (7,)),
        "short-vector": (line, [Shard(0)], (1,)),
        "copied-vector": (two, [Replicate(), Shard(0)], (3,)),
        "twice-vector": (two, [Shard(0), Shard(0)], (9,)),
        "scalar": (line, [Replicate()], ()),
        "copies": (line, [Replicate()], (4, 2)),
        "empty": (line, [Shard(1)], (0, 4)),
        "part-of-the-mesh": (two["a"], [Shard(1)], (3, 5)),
        "vector-of-the-other-part": (two["b"], [Shard(0)], (5,)),
    }
    named: Named = [
        (name, placed(10 * number, over, placements, *shape))
        for number, (name, (over, placements, shape)) in enumerate(kinds.items())
    ]
    plain = nn.Parameter(layouts.normal(1, 3, 4))
    plain.grad = layouts.normal(2, 3, 4)
    return [*named[:5], ("plain", plain), *named[5:]]


def clipped(layout: str, size: int, scale: float | None = None) -> Clipped:
    """By `clip_`; with a scaler, if there is a loss scale."""
    named = by_hand(size) if layout == "by-unit" else layouts.build(layout, size)
    values = {name: layouts.whole(parameter) for name, parameter in named}
    before = {name: layouts.whole(grad_of(parameter)) for name, parameter in named}
    clipper = GradClipper(named, rule=AGC(FACTOR))
    held = [layouts.local(grad_of(parameter)).clone() for _, parameter in named]
    if scale is None:
        stats = clipper.clip_()
    else:
        optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.0, foreach=False)
        scaler = training.make_scaler(scale)
        scaler.scale(torch.zeros(()))  # which makes the scale
        stats = clipper.step(optimizer, scaler=scaler)
    now = [layouts.local(grad_of(parameter)) for _, parameter in named]
    return Clipped(
        values,
        before,
        {name: layouts.whole(grad_of(parameter)) for name, parameter in named},
        stats.coef.tolist(),
        stats.threshold.tolist(),
        any(not mine.equal(other) for mine, other in zip(held, now, strict=True)),
    )


def absent(size: int, lacking: Sequence[int]) -> list[Any]:
    """Of which the ranks `lacking` have no gradients of two tensors."""
    line = layouts.mesh(size)
    named: Named = [
        ("vector", placed(1, line, [Shard(0)], 8)),
        ("rows", placed(2, line, [Shard(0)], 8, 3)),
        ("other", placed(3, line, [Shard(1)], 2, 8)),
    ]
    whole = {name: layouts.whole(parameter) for name, parameter in named}
    grads = [layouts.whole(grad_of(parameter)) for _, parameter in named]
    if dist.get_rank() in lacking:
        for _, parameter in named[:2]:
            parameter.grad = None
    stats = GradClipper(named, rule=AGC(FACTOR)).clip_()
    after = [
        None if parameter.grad is None else layouts.local(parameter.grad) for _, parameter in named
    ]
    return [whole, grads, after, stats.coef.tolist(), stats.threshold.tolist(), bool(stats.skipped)]


def refused(kind: str, guilty: int) -> tuple[str, bool]:
    """What is raised where the gradient of one rank, or of all, does not suit; and whether the step
    was skipped."""
    line = layouts.mesh(dist.get_world_size())
    first, second = placed(1, line, [Shard(0)], 8, 3), placed(2, line, [Shard(0)], 8)
    if kind == "partial":
        first = placed(1, line, [Partial()], 8, 3)
    elif kind == "placed-otherwise":
        first.grad = grad_of(first).redistribute(line, [Shard(1)])  # type: ignore[attr-defined]
    elif dist.get_rank() == guilty:
        odd = torch.ones(()).expand(layouts.local(first).shape)
        first.grad = DTensor.from_local(odd, line, [Shard(0)], run_check=False)
    before = layouts.local(grad_of(second)).clone()
    try:
        stats = GradClipper([("w", first), ("b", second)], rule=AGC(FACTOR)).clip_()
    except TypeError as error:
        return str(error), layouts.local(grad_of(second)).equal(before)
    return "", bool(stats.skipped) and layouts.local(grad_of(second)).equal(before)


class Halving:
    """A rule that halves units; on one rank by another factor."""

    per_tensor: bool = True

    def __init__(self, by_unit: bool, guilty: int, factor: float) -> None:
        self.by_unit = by_unit
        self.factor = factor if dist.get_rank() == guilty else 0.5

    def init(self, n: int, device: torch.device) -> State:
        return {}

    def decide(self, measured: Measured, state: State) -> Decision:
        coef = torch.full_like(measured.norms, self.factor)
        counts = [len(each) if each.dim() > 1 else 1 for each in measured.gradients]
        units = [coef.new_full((count,), self.factor) for count in counts]
        return Decision(coef, 2 * coef, state, units)


class Whole(Halving):
    """One coefficient, whatever it is told of units."""

    per_tensor = False

    def decide(self, measured: Measured, state: State) -> Decision:
        assert measured.whole_units is None
        coef = torch.full_like(measured.total, 0.5)
        return Decision(coef, 2 * coef, state)


def halved_as_one() -> float:
    parameter = placed(1, layouts.mesh(dist.get_world_size()), [Shard(0)], 8, 3)
    return GradClipper([("w", parameter)], rule=Whole(True, 0, 0.5)).clip_().coef.item()


def halved(by_unit: bool, factor: float, nonfinite: Any) -> tuple[str, list[float], bool]:
    line = layouts.mesh(dist.get_world_size())
    parameter = placed(1, line, [Shard(0)], 8, 3)
    rule = Halving(by_unit, 1, factor)
    clipper = GradClipper([("w", parameter)], rule=rule, nonfinite=nonfinite)
    try:
        stats = clipper.clip_()
    except (RuntimeError, ValueError) as error:
        return str(error), [], False
    return "", stats.coef.tolist(), bool(stats.skipped)


def spoiled(nonfinite: Any) -> list[Any]:
    """A NaN on rank 1, in a unit that others have parts of."""
    line = layouts.mesh(dist.get_world_size())
    parameter = placed(1, line, [Shard(1)], 2, 8)
    whole = layouts.whole(parameter), layouts.whole(grad_of(parameter))
    if dist.get_rank() == 1:
        layouts.local(grad_of(parameter))[1, 0] = torch.nan
    clipper = GradClipper([("w", parameter)], rule=AGC(FACTOR), nonfinite=nonfinite)
    try:
        stats = clipper.clip_()
    except RuntimeError as error:
        return [*whole, layouts.whole(grad_of(parameter)), str(error)]
    return [*whole, layouts.whole(grad_of(parameter)), bool(stats.skipped)]


def sent(kind: str) -> tuple[list[str], list[int]]:
    """The collectives of a step, and how many elements each sum or minimum has."""
    line = layouts.mesh(dist.get_world_size())
    kinds: dict[str, Callable[[], Named]] = {
        "whole-units": lambda: [(f"w{n}", placed(n, line, [Shard(0)], 64, 8)) for n in range(20)],
        "vectors": lambda: [(f"b{n}", placed(n, line, [Shard(0)], 64)) for n in range(20)],
    }
    clipper = GradClipper(kinds[kind](), rule=AGC(FACTOR))
    clipper.clip_()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        operators = [operator for operator, _ in traffic.sent(clipper.clip_)]
    return operators, [call.args[0].numel() for call in reduce.call_args_list]
