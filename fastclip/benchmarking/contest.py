"""What a row of the table is: who competes on what, the target, the least traffic."""

from collections.abc import Callable
from dataclasses import dataclass

from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.workloads import Shape, gpt2_small

OURS = "fastclip"


@dataclass(frozen=True)
class Size:
    """How big the workloads are and how long each row may take."""

    gpt2: list[Shape]
    gpt: tuple[int, int]  # width and blocks of the models that are trained
    mlp: tuple[int, int]
    n_small: int
    probe_elements: int
    seconds: float
    least_rounds: int
    most_rounds: int


# 2**26 floats are 256 MiB: far beyond any cache, so the probes see memory.
FULL = Size(
    gpt2_small(), (384, 6), (1024, 24), 2000, 1 << 26, seconds=7.0, least_rounds=6, most_rounds=200
)
# A smoke test: everything runs, the ratios mean nothing (most of it fits in cache).
QUICK = Size(
    gpt2_small(width=24),
    (32, 1),
    (512, 2),
    200,
    1 << 20,
    seconds=0.05,
    least_rounds=2,
    most_rounds=4,
)


@dataclass(frozen=True)
class Contest:
    """Sides that do the same job on the same `n_bytes` of gradients; one is called OURS."""

    sides: list[Side]
    n_bytes: int


@dataclass(frozen=True)
class Row:
    """`reads` and `writes` are the passes over the gradients that no implementation can avoid;
    none means that the row has no limit in memory traffic."""

    name: str
    title: str
    build: Callable[[Size], Contest]
    at_least: float | None = None
    reads: int = 0
    writes: int = 0
    limit: float | None = None
    share: float = 1.0  # of the seconds that a row may take
