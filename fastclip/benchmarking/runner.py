"""Runs one row: warm up, race, and derive the limit from rates seen among the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import (
    Side,
    Spread,
    interleave,
    once,
    paired_ratios,
    rounds_for,
    spread,
)

READS = ("read by sum", "read by aminmax")
REWRITE = "multiply in place"
WRITE = "fill"
COPY = "copy"
HOST = 0.2  # of the fastest time: where memory takes less, the host decides, and there is no limit
PROBED = 5  # times in a row: the probes take longer than most of what is timed


@dataclass(frozen=True)
class Rates:
    """Bytes of the tensor a second, by torch's own kernels: the faster of two reads, a write, a
    read and write back in place, a copy (counted once, though it reads and writes)."""

    read: float
    write: float
    rewrite: float
    copy: float


@dataclass(frozen=True)
class Timing:
    """One side of one row; `ratio` is how many times faster than the baseline it was, paired;
    `of_floor` the least time that memory traffic allows over its time."""

    side: str
    ms: Spread
    ratio: Spread
    of_floor: float | None
    note: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """One measured row. Ratios are the point; times and rates are for information."""

    row: Row
    baseline: str
    timings: tuple[Timing, ...]  # ours is the first
    gaps: dict[str, str]
    limit: float | None
    floor_ms: float | None
    rounds: int
    n_bytes: int
    n_tensors: int
    rates: Rates | None

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def title(self) -> str:
        return self.row.title

    @property
    def at_least(self) -> float | None:
        return self.row.at_least

    @property
    def ours(self) -> Timing:
        return self.timings[0]

    @property
    def ratio(self) -> Spread:
        return self.ours.ratio

    @property
    def baseline_timing(self) -> Timing:
        return next(timing for timing in self.timings if timing.side == self.baseline)

    @property
    def host(self) -> bool:
        """Whether memory traffic is too small a part of the time to limit it."""
        return self.floor_ms is not None and self.ours.of_floor is None

    def against(self, rival: Timing) -> Spread:
        """How many times faster than this rival fastclip was, in pairs of the same round."""
        return spread(paired_ratios(self.ours.seconds, rival.seconds))

    @property
    def met(self) -> bool | None:
        """None where there is no target. A NaN would count as missed."""
        return None if self.at_least is None else self.ratio.median >= self.at_least


def run(row: Row, size: Size) -> Result:
    contest = row.build(size)
    probe_bytes = contest.n_bytes if row.warm else size.probe_bytes
    probes = _probes(probe_bytes) if row.reads or row.writes else []
    # Warm-up: first touch of pages, building, thread pools; every element of the result checked.
    interleave(contest.sides, rounds=1)
    start = perf_counter()
    interleave(contest.sides, rounds=1)
    budget = size.seconds * row.share
    rounds = rounds_for(perf_counter() - start, budget, size.least_rounds, size.most_rounds)
    probed: dict[str, list[float]] = {probe.name: [] for probe in probes}
    turns = {index * rounds // PROBED for index in range(PROBED)}

    def probe(index: int) -> None:
        if index in turns:
            for one in probes:
                probed[one.name].append(once(one))

    probe(0)  # warm-up
    for times in probed.values():
        times.clear()
    seconds = interleave(contest.sides, rounds, probe)
    return _judge(row, contest, seconds, _rates(probed, probe_bytes) if probes else None)


def _judge(
    row: Row, contest: Contest, seconds: dict[str, list[float]], rates: Rates | None
) -> Result:
    baseline = min(contest.rivals(), key=lambda name: median(seconds[name]))
    floor, limit, host = None, row.limit, False
    if rates is not None:
        floor = least_seconds(contest.n_bytes, row.reads, row.writes, rates)
        host = floor < HOST * min(map(median, seconds.values()))
        if limit is None and not host:
            limit = median(seconds[baseline]) / floor

    def timing(name: str) -> Timing:
        times = seconds[name]
        of_floor = None if floor is None or host else floor / median(times)
        note = contest.notes.get(name, "")
        ratio = spread(paired_ratios(times, seconds[baseline]))
        return Timing(name, milliseconds(times), ratio, of_floor, note, tuple(times))

    return Result(
        row=row,
        baseline=baseline,
        timings=tuple(timing(name) for name in sorted(seconds, key=lambda name: name != OURS)),
        gaps=contest.gaps,
        limit=limit,
        floor_ms=None if floor is None else floor * 1e3,
        rounds=len(seconds[OURS]),
        n_bytes=contest.n_bytes,
        n_tensors=contest.n_tensors,
        rates=rates,
    )


def milliseconds(seconds: Sequence[float]) -> Spread:
    return spread([1e3 * one for one in seconds])


def least_seconds(n_bytes: int, reads: int, writes: int, rates: Rates) -> float:
    """The time that memory alone takes. A write is one of reading and writing back in place, whose
    rate counts the bytes once (so it needs no second read on top)."""
    return n_bytes * (reads / rates.read + writes / rates.rewrite)


def _rates(seconds: dict[str, list[float]], n_bytes: int) -> Rates:
    return Rates(
        read=n_bytes / min(median(seconds[name]) for name in READS),
        write=n_bytes / median(seconds[WRITE]),
        rewrite=n_bytes / median(seconds[REWRITE]),
        copy=n_bytes / median(seconds[COPY]),
    )


def _probes(n_bytes: int) -> list[Side]:
    """What memory gives to torch's own fastest kernels."""
    tensor = torch.ones(-(-n_bytes // 4))
    target = torch.empty_like(tensor)
    return [
        Side(READS[0], tensor.sum),
        Side(READS[1], tensor.aminmax),
        Side(REWRITE, lambda: tensor.mul_(1.0)),
        Side(WRITE, lambda: target.fill_(1.0)),
        Side(COPY, lambda: target.copy_(tensor)),
    ]
