"""`python -m benchmarks.gate`: fails if fastclip has become slow, as `.ci/run` does at its end.

The rows of `fastclip.benchmarking.functions` that have a target, at full size but with few rounds.
What is judged is the ratio to torch within this run, and only if nothing else ran beside it: with
one other busy program a parallel region can take 400 times as long, and that says nothing about a
kernel. A clean measurement that reaches `SHARE` of the target passes the row, `TRIES` clean ones
that do not fail it. It is measured again until then, as long as there is time.

The targets are those of the vectorised C++ kernels, on as many threads as they were set with; where
there are no such kernels or fewer cores nothing can be judged. All that is not judged is named.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import functions, machine
from fastclip.benchmarking.contest import FULL, OURS, Contest, Row, Size
from fastclip.benchmarking.runner import run

SHARE = 0.8  # of a row's at_least
TRIES = 3
SECONDS = 100.0  # then nothing is measured again; one measurement of each row takes 50 s
THREADS = 2  # of the runs that the targets are for
SIMD = ("avx2", "avx512")  # both read as fast as memory gives; the plain kernels do not
ROWS = [row for row in functions.ROWS if row.at_least is not None]
# Peers that return new arrays get no memory: what they compile would take longer than all the rest.
SIZE = replace(FULL, seconds=2.0, memory_bytes=0)


@dataclass
class Verdict:
    """The ratios to torch that a row's clean and disturbed measurements gave, and the least that
    would do. Only the clean ones count."""

    name: str
    at_least: float
    clean: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    why: str | None = None  # the last measurement was disturbed

    @property
    def limit(self) -> float:
        return SHARE * self.at_least

    @property
    def met(self) -> bool:
        """Whether one measurement got there; a NaN did not."""
        return any(ratio >= self.limit for ratio in self.clean)

    @property
    def failed(self) -> bool:
        return not self.met and len(self.clean) >= TRIES

    @property
    def judged(self) -> bool:
        return self.met or self.failed

    def __str__(self) -> str:
        ratios = ", ".join(f"{ratio:.2f}x" for ratio in self.clean)
        others = ", ".join(f"{ratio:.2f}x" for ratio in self.disturbed)
        seen = "; ".join(filter(None, [ratios, others and f"disturbed: {others}"])) or "no time"
        word = "ok" if self.met else "TOO SLOW" if self.failed else "not judged"
        why = "" if self.judged or self.why is None else f": {self.why}"
        return (
            f"{word:<11}{self.name:<28}{seen} "
            f"(target {self.at_least:g}x, limit {self.limit:.3g}x){why}"
        )


def measure(row: Row, size: Size, verdict: Verdict) -> None:
    """One more measurement of a row, put where it belongs."""
    others = machine.Others()
    ratio = run(row, size).ratio.median
    verdict.why = disturbance(others.busy_cores())
    (verdict.clean if verdict.why is None else verdict.disturbed).append(ratio)


def disturbance(busy_cores: float | None) -> str | None:
    """What makes a measurement worthless: other programs, by their share of the cores.

    Slow parallel regions are no such thing: threads of our own that spin would excuse themselves.
    """
    cores = machine.n_cores()
    if busy_cores is None or busy_cores <= machine.BUSY_CORES * max(1, cores / THREADS):
        return None
    return f"other programs kept {busy_cores:.2f} of {cores} cores busy"


def _bare(row: Row) -> Row:
    """The row without what its ratio does not need: other peers, and the rates of memory."""

    def build(size: Size) -> Contest:
        contest = row.build(size)
        names = (OURS, *contest.rivals())
        return replace(contest, sides=[side for side in contest.sides if side.name in names])

    return replace(row, build=build, reads=0, writes=0)


def why_not() -> str | None:
    """Why nothing can be judged here, or None."""
    name, reason = backends.explain()["cpu"]
    if name != "cpu":
        return f"the targets are of the C++ kernels, and the backend is {name} ({reason})"
    if (level := native.simd()) not in SIMD:
        return f"the targets are of the kernels for {' and '.join(SIMD)}, and these are {level}"
    if machine.n_cores() < THREADS:
        return f"the targets are for {THREADS} threads, and there is {machine.n_cores()} core"
    return None


def judge(rows: Sequence[Row], size: Size, say: Callable[[str], None]) -> list[Verdict]:
    """All verdicts, each said as soon as it is there; those that time did not allow at the end.

    A row that was disturbed waits until the others have been measured as often as it has."""
    end = time.monotonic() + SECONDS
    verdicts = [Verdict(row.name, row.at_least) for row in rows if row.at_least is not None]
    waiting = list(zip(verdicts, map(_bare, rows), strict=True))
    while waiting and time.monotonic() < end:
        verdict, row = min(waiting, key=lambda one: len(one[0].disturbed))
        measure(row, size, verdict)
        if verdict.judged:
            say(str(verdict))
            waiting.remove((verdict, row))
    for verdict, _ in waiting:
        say(str(verdict))
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate",
        description=f"Fails if a ratio to torch falls below {SHARE:.0%} of its target.",
    )
    parser.parse_args(arguments)
    if reason := why_not():
        print(f"benchmarks.gate: nothing judged: {reason}")
        return 0
    torch.set_num_threads(THREADS)
    verdicts = judge(ROWS, SIZE, lambda text: print(text, flush=True))
    if left := [verdict.name for verdict in verdicts if not verdict.judged]:
        print(f"benchmarks.gate: {len(left)} of {len(ROWS)} rows not judged: {', '.join(left)}")
    slow = [verdict.name for verdict in verdicts if verdict.failed]
    if slow:
        print(f"benchmarks.gate: too slow, {TRIES} times each: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
