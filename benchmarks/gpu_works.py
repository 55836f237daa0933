"""What is clipped on a GPU: sizes, numbers of tensors, and the gradients of models.

The models are those of the CPU's suite, except that a GPU holds Llama 3 8B as it is, and four times
the width of the mixture of experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fastclip.benchmarking import models, workloads
from fastclip.benchmarking.models import Shape
from fastclip.benchmarking.workloads import DTYPES, MEAN_SQUARE, MIXED, WORKLOADS

KIB = 1 << 10
PARTS = 4  # tensors of the works of `bytes`
TINY = 16  # elements of each tensor of those of `tensors`
LARGEST_HALF = 65504.0  # of a float16, in which torch returns norms: beyond, it clips to zeros
STEPPED = "gpt2-small"
LARGER = {
    "llama3-8b/16": ("llama3-8b", models.llama()),
    "moe-20k/256": ("moe-20k/16", models.experts(models.EXPERT_LAYERS, divisor=4)),
}


@dataclass(frozen=True)
class Work:
    """One list of gradients. `sweep` is "bytes", "tensors", "workloads", or "steps" for an
    optimizer's steps under mixed precision."""

    sweep: str
    name: str
    shapes: tuple[Shape, ...]
    dtype: str = "float32"

    @property
    def dtypes(self) -> list[torch.dtype]:
        """One a shape."""
        return workloads.dtypes(self.shapes, self.dtype)

    @property
    def n_bytes(self) -> int:
        each = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in each)


@dataclass(frozen=True)
class Plan:
    """The works in the order of their weight, a race of each not clipped and clipped; `seconds` are
    those of one race."""

    works: tuple[Work, ...]
    probe: int  # bytes of the tensor behind the limits
    seconds: float
    least_rounds: int
    most_rounds: int


def _works(
    lists: Mapping[str, Sequence[Shape]], sizes: Sequence[int], counts: Sequence[int]
) -> tuple[Work, ...]:
    by_bytes = [Work("bytes", "bytes", ((n // 4 // PARTS,),) * PARTS) for n in sizes]
    by_count = [Work("tensors", "tensors", tuple(models.many(n, TINY))) for n in counts]
    steps = Work("steps", STEPPED, tuple(lists[STEPPED]))
    of_models = [
        Work("workloads", name, tuple(shapes), dtype)
        for dtype in DTYPES
        for name, shapes in lists.items()
        if not (len(shapes) == 1 and dtype == MIXED)  # one tensor has one dtype
        and not (dtype == "float16" and norm(shapes) > LARGEST_HALF)
    ]
    return (*by_bytes, *by_count, steps, *of_models)


def norm(shapes: Sequence[Shape]) -> float:
    return math.sqrt(MEAN_SQUARE * sum(math.prod(shape) for shape in shapes))


def _lists() -> dict[str, list[Shape]]:
    named = (LARGER.get(name, (name, one.shapes())) for name, one in WORKLOADS.items())
    return dict(named)


FULL = Plan(
    _works(_lists(), [KIB << n for n in range(6, 25, 2)], [1, 10, 100, 1000, 10_000, 100_000]),
    probe=1 << 30,
    seconds=0.7,
    least_rounds=5,
    most_rounds=30,
)
QUICK = Plan(
    _works({STEPPED: models.gpt2(16), "20x1024": models.many(20, 1024)}, [KIB, 64 * KIB], [1, 10]),
    probe=1 << 20,
    seconds=0.02,
    least_rounds=2,
    most_rounds=4,
)
