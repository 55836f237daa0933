"""A model's gradients, split by hand over the ranks in the ways that people do it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SHAPES = {
    "embed": (12, 6),
    "w0": (8, 6),
    "norm0": (8,),
    "w1": (6, 8),
    "norm1": (6,),
    **{f"experts.{n}": (5, 4 + n) for n in range(4)},
}


class Part(NamedTuple):
    """What a rank holds of one tensor."""

    name: str
    rows: slice = slice(None)
    counts: bool = True


class Split(NamedTuple):
    """Who holds what, and the groups to combine over, one after the other."""

    ranks: Sequence[Sequence[Part]]
    groups: Sequence[Sequence[Sequence[int]]]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def names(self) -> list[str]:
        return list(dict.fromkeys(part.name for parts in self.ranks for part in parts))


def _tensor_parallel(stage: int, part: int) -> list[Part]:
    """Rows of the matrices; norms are copies."""
    half = slice(0, 4) if part == 0 else slice(4, None)
    return [Part(f"w{stage}", half), Part(f"norm{stage}", counts=part == 0)]


def _tied(part: int, counts: bool) -> Part:
    return Part("embed", slice(0, 7) if part == 0 else slice(7, None), counts)


def _expert(rank: int) -> list[Part]:
    return [Part("w0", counts=rank == 0), Part(f"experts.{rank}")]


SPLITS = {
    "pipeline": Split(
        [
            [Part("embed"), Part("w0"), Part("norm0")],
            [Part("w1"), Part("norm1"), Part("embed", counts=False)],
        ],
        [[[0, 1]]],
    ),
    "tensor-parallel": Split([_tensor_parallel(0, part) for part in range(2)], [[[0, 1]]]),
    "experts": Split([_expert(rank) for rank in range(4)], [[[0, 1, 2, 3]]]),
    "tensor-parallel-pipeline": Split(
        [
            [_tied(0, True), *_tensor_parallel(0, 0)],
            [_tied(1, True), *_tensor_parallel(0, 1)],
            [*_tensor_parallel(1, 0), _tied(0, False)],
            [*_tensor_parallel(1, 1), _tied(1, False)],
        ],
        [[[0, 1], [2, 3]], [[0, 2], [1, 3]]],
    ),
    "nothing-on-two": Split([[], [Part("w1"), Part("w0")], [], [Part("norm0")]], [[[0, 1, 2, 3]]]),
}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of the whole model, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) * 10.0**n
        for n, (name, shape) in enumerate(SHAPES.items(), -2)
    }


def parameters(split: Split) -> dict[str, Tensor]:
    """Those of this rank."""
    whole = gradients(1000)
    parts = split.ranks[dist.get_rank()]
    return {part.name: whole[part.name][part.rows].clone().requires_grad_() for part in parts}


def assign(split: Split, own: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Give this rank its parts of whole gradients; none of those that are missing."""
    for part in split.ranks[dist.get_rank()]:
        whole = grads.get(part.name)
        own[part.name].grad = None if whole is None else whole[part.rows].clone()


def grouped(split: Split) -> dict[str, Any]:
    """The arguments of a GradClipper."""
    counted = {part.name: part.counts for part in split.ranks[dist.get_rank()]}
    groups = [dist.new_subgroups_by_enumeration([*map(list, each)])[0] for each in split.groups]
    counts: Callable[[str, Tensor], bool] = lambda name, _: counted[name]  # noqa: E731
    return {"process_group": groups, "counts": counts}
