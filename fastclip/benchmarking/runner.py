"""Runs one row: warm up, race, and derive the limit from rates seen in the same rounds."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import (
    Side,
    Spread,
    interleave,
    paired_ratios,
    rounds_for,
    spread,
)

READS = ("read by sum", "read by aminmax")
WRITE = "multiply in place"


@dataclass(frozen=True)
class Result:
    """One measured row. Ratios are the point; times and rates are for information."""

    name: str
    title: str
    baseline: str
    ratio: Spread
    at_least: float | None
    limit: float | None
    rounds: int
    baseline_ms: float
    ours_ms: float
    n_bytes: int
    read_gbs: float | None
    write_gbs: float | None

    @property
    def met(self) -> bool | None:
        """None where there is no target. A NaN would count as missed."""
        return None if self.at_least is None else self.ratio.median >= self.at_least


def run(row: Row, size: Size) -> Result:
    contest = row.build(size)
    probes = _probes(size.probe_elements) if row.reads or row.writes else []
    sides = [*contest.sides, *probes]
    start = perf_counter()
    interleave(sides, rounds=1)  # warm-up: first touch of pages, building, thread pools
    budget = size.seconds * row.share
    rounds = rounds_for(perf_counter() - start, budget, size.least_rounds, size.most_rounds)
    seconds = interleave(sides, rounds)
    return _judge(row, contest, seconds, size.probe_elements * 4)


def _judge(row: Row, contest: Contest, seconds: dict[str, list[float]], probe_bytes: int) -> Result:
    rivals = [side.name for side in contest.sides if side.name != OURS]
    baseline = min(rivals, key=lambda name: median(seconds[name]))
    baseline_s = median(seconds[baseline])
    read = write = None
    limit = row.limit
    if row.reads or row.writes:
        read = probe_bytes / min(median(seconds[name]) for name in READS)
        write = probe_bytes / median(seconds[WRITE])
        limit = baseline_s / least_seconds(contest.n_bytes, row.reads, row.writes, read, write)
    return Result(
        name=row.name,
        title=row.title,
        baseline=baseline,
        ratio=spread(paired_ratios(seconds[OURS], seconds[baseline])),
        at_least=row.at_least,
        limit=limit,
        rounds=len(seconds[OURS]),
        baseline_ms=baseline_s * 1e3,
        ours_ms=median(seconds[OURS]) * 1e3,
        n_bytes=contest.n_bytes,
        read_gbs=None if read is None else read / 1e9,
        write_gbs=None if write is None else write / 1e9,
    )


def least_seconds(n_bytes: int, reads: int, writes: int, read: float, write: float) -> float:
    """The time that memory alone takes; `write` is the rate of reading and writing back in place,
    counted in bytes of the tensor (so a write pass needs no second read on top)."""
    return n_bytes * (reads / read + writes / write)


def _probes(elements: int) -> list[Side]:
    """What memory gives to torch's own fastest reads and to its in-place multiply."""
    tensor = torch.ones(elements)
    return [
        Side(READS[0], tensor.sum),
        Side(READS[1], tensor.aminmax),
        Side(WRITE, lambda: tensor.mul_(1.0)),
    ]
