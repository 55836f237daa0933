"""What is clipped on a GPU: sizes and numbers of tensors, and the gradients of models."""

from dataclasses import dataclass

import torch

from fastclip.benchmarking.workloads import Shape, gpt2_small, many

FLOAT32 = (torch.float32,)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float32": FLOAT32,
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "mixed": (torch.float32, torch.bfloat16),
}
KIB = 1 << 10
PARTS = 4  # tensors of the works of `bytes`
TINY = 16  # elements of each tensor of those of `tensors`


@dataclass(frozen=True)
class Work:
    """One list of gradients; the dtypes take turns in it. `sweep` is "bytes", "tensors",
    "workloads", or "steps" for optimizer's steps under mixed precision."""

    sweep: str
    name: str
    shapes: tuple[Shape, ...]
    dtype: str = "float32"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return DTYPES[self.dtype]

    @property
    def n_bytes(self) -> int:
        """At most: the widest dtype is counted."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) * max(
            dtype.itemsize for dtype in self.dtypes
        )


@dataclass(frozen=True)
class Plan:
    """The works, in the order of their weight; `seconds` are those of one race."""

    works: tuple[Work, ...]
    probe: int  # bytes of the tensor behind the limits
    seconds: float
    least_rounds: int
    most_rounds: int


def _works(models: dict[str, list[Shape]], sizes: list[int], counts: list[int]) -> tuple[Work, ...]:
    by_bytes = [Work("bytes", "bytes", ((n // 4 // PARTS,),) * PARTS) for n in sizes]
    by_count = [Work("tensors", "tensors", tuple(many(n, TINY))) for n in counts]
    steps = [Work("steps", name, tuple(shapes)) for name, shapes in list(models.items())[:1]]
    lists = [
        Work("workloads", name, tuple(shapes), dtype)
        for dtype in DTYPES
        for name, shapes in models.items()
    ]
    return (*by_bytes, *by_count, *steps, *lists)


FULL = Plan(
    _works(
        {"gpt2": gpt2_small(), "2000x1024": many(2000, 1024)},
        sizes=[KIB << n for n in range(6, 25, 2)],
        counts=[1, 10, 100, 1000, 10_000, 100_000],
    ),
    probe=1 << 30,
    seconds=1.0,
    least_rounds=5,
    most_rounds=30,
)
QUICK = Plan(
    _works({"gpt2": gpt2_small(16), "20x1024": many(20, 1024)}, [64 * KIB, 256 * KIB], [1, 10]),
    probe=1 << 20,
    seconds=0.02,
    least_rounds=2,
    most_rounds=4,
)
