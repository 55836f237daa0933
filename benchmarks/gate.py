"""`python -m benchmarks.gate`: fails if fastclip has become slow, as `.ci/run` does at its end.

The rows of `fastclip.benchmarking.functions` that have a target, at full size but with few rounds.
What is judged is the ratio to torch within this run. A row fails only if `TRIES` measurements in
turn give less than `SHARE` of its target, and nothing else ran beside any of them: with one other
busy program a parallel region can take 400 times as long, and that says nothing about a kernel.

The targets are those of the C++ kernels, on as many threads as they were set with; where there are
no such kernels or fewer cores nothing can be judged. All that is not judged is named.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fastclip import backends
from fastclip.benchmarking import functions, machine
from fastclip.benchmarking.contest import FULL, OURS, Contest, Row, Size
from fastclip.benchmarking.runner import run

SHARE = 0.8  # of a row's at_least
TRIES = 3
THREADS = 2  # of the runs that the targets are for
ROWS = [row for row in functions.ROWS if row.at_least is not None]
SIZE = replace(FULL, seconds=2.0)


@dataclass
class Verdict:
    """The ratios to torch that a row's measurements gave, the least that would do, and what
    disturbed those that gave less."""

    name: str
    at_least: float
    ratios: list[float] = field(default_factory=list)
    disturbed: str | None = None

    @property
    def limit(self) -> float:
        return SHARE * self.at_least

    @property
    def met(self) -> bool:
        """Whether one measurement got there; a NaN did not."""
        return any(ratio >= self.limit for ratio in self.ratios)

    @property
    def failed(self) -> bool:
        return not self.met and self.disturbed is None

    def __str__(self) -> str:
        ratios = ", ".join(f"{ratio:.2f}x" for ratio in self.ratios)
        word = "ok" if self.met else "TOO SLOW" if self.failed else "not judged"
        why = "" if self.met or self.failed else f": {self.disturbed}"
        return (
            f"{word:<11}{self.name:<28}{ratios} "
            f"(target {self.at_least:g}x, limit {self.limit:.3g}x){why}"
        )


def judge(row: Row, size: Size) -> Verdict:
    """Measures a row until it meets its limit, at most `TRIES` times."""
    assert row.at_least is not None
    bare = _bare(row)
    verdict = Verdict(row.name, row.at_least)
    while not verdict.met and len(verdict.ratios) < TRIES:
        others = machine.Others()
        verdict.ratios.append(run(bare, size).ratio.median)
        if not verdict.met:
            verdict.disturbed = others.idleness().complaint() or verdict.disturbed
    return verdict


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
    if machine.n_cores() < THREADS:
        return f"the targets are for {THREADS} threads, and there is {machine.n_cores()} core"
    return None


def judge_all(rows: Sequence[Row], size: Size, say: Callable[[str], None]) -> list[Verdict]:
    """All verdicts, each said as soon as it is there."""
    verdicts = []
    for row in rows:
        verdicts.append(judge(row, size))
        say(str(verdicts[-1]))
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
    verdicts = judge_all(ROWS, SIZE, lambda text: print(text, flush=True))
    slow = [verdict.name for verdict in verdicts if verdict.failed]
    if slow:
        print(f"benchmarks.gate: too slow, {TRIES} times each: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
