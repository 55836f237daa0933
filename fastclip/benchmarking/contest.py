"""What a row of the table is: who competes on what, the target, the least traffic."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fastclip.benchmarking import workloads
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.models import Shape

OURS = "fastclip"


@dataclass(frozen=True)
class Size:
    """How big the workloads are and how long each row may take."""

    divisor: int  # of every dimension of a workload
    most_tensors: int
    gpt: tuple[int, int]  # width and blocks of the models that are trained
    mlp: tuple[int, int]
    probe_bytes: int
    seconds: float
    least_rounds: int
    most_rounds: int
    memory_bytes: int  # what gradients and results of a peer that works out of place may occupy
    cache_bytes: int | None = None  # of the last-level cache; None: this machine's

    def shapes(self, workload: str) -> list[Shape]:
        shapes = workloads.shapes(workload)[: self.most_tensors]
        return [tuple(-(-n // self.divisor) for n in shape) for shape in shapes]


# 256 MiB is far beyond any cache, so the probes see memory.
FULL = Size(
    divisor=1,
    most_tensors=1 << 20,
    gpt=(384, 6),
    mlp=(1024, 24),
    probe_bytes=1 << 28,
    seconds=4.0,
    least_rounds=6,
    most_rounds=200,
    memory_bytes=8 << 30,
)
# A smoke test: everything runs, the ratios mean nothing (most of it fits in cache).
QUICK = Size(
    divisor=32,
    most_tensors=24,
    gpt=(32, 1),
    mlp=(512, 2),
    probe_bytes=1 << 22,
    seconds=0.05,
    least_rounds=2,
    most_rounds=4,
    memory_bytes=8 << 30,
    cache_bytes=1 << 20,
)


@dataclass(frozen=True)
class Contest:
    """Sides that do the same job on the same `n_bytes` of gradients in `n_tensors`; one is called
    OURS. Ratios go to the fastest of `baselines` (default: of all rivals). `gaps` says of each peer
    that takes no part why."""

    sides: list[Side]
    n_bytes: int
    n_tensors: int
    baselines: tuple[str, ...] = ()
    gaps: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # of a side: version, what differs

    def rivals(self) -> tuple[str, ...]:
        return self.baselines or tuple(side.name for side in self.sides if side.name != OURS)


@dataclass(frozen=True)
class Row:
    """`reads` and `writes` are the passes over the gradients that no implementation can avoid (a
    write reads and writes back in place); none means that the row has no limit in memory traffic.
    `limit` is then the best possible ratio, if it is known."""

    name: str
    title: str
    build: Callable[[Size], Contest]
    at_least: float | None = None
    reads: int = 0
    writes: int = 0
    limit: float | None = None
    share: float = 1.0  # of the seconds that a row may take
    workload: str = ""
    dtype: str = ""
    clips: bool | None = None
    copies: int = 1  # of the gradients' size, that the row needs at least: parameters, moments
    rivals: tuple[str, ...] = ("torch",)  # as sides or as gaps, each of them takes part
    warm: bool = False  # the last-level cache holds the gradients: so limits are its rates
    big: bool = False  # left out unless asked for: more time or memory than the suite may take
