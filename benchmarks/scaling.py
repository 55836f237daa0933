"""`python -m benchmarks.scaling`: what a clip costs by number of tensors, by bytes, by threads.

torch and fastclip, not clipped and clipped, take turns on the same float32 gradients:

- `tensors`: lists of tensors of 16 elements, which caches hold: what the host does;
- `bytes`: four tensors of 1 KiB to 4 GiB together that no cache holds, beside torch's own rates;
- `threads`: the gradients of GPT-2 small by 1 thread up to one a core, beside the same rates.

A line is fitted to the first two: fixed cost and slope. Writes ``results/scaling.csv`` if all is
measured, at full size; a quick or a partial run writes only where ``--csv`` says.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

import fastclip
from benchmarks.lines import fit
from benchmarks.problems import RATES, Operation, Problem, both
from benchmarks.records import RESULTS, write
from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import machine
from fastclip.benchmarking.contest import OURS
from fastclip.benchmarking.measure import (
    Side,
    interleave,
    paired_ratios,
    rounds_for,
    spread,
)
from fastclip.benchmarking.models import Shape, gpt2, many
from fastclip.benchmarking.workloads import gradients

KIB, GIB = 1 << 10, 1 << 30
TINY = 16  # elements of each tensor of the first sweep: a cache line
PARTS = 4  # tensors of the second sweep
PROBE = 1 << 26  # elements of the tensor whose rates stand beside the threads: 256 MiB
CALLS = {"torch": torch.nn.utils.clip_grad_norm_, OURS: fastclip.clip_grad_norm_}
CLIPPED = " clipped"  # what the name of a side that clips ends with
SWEEPS = ("tensors", "bytes", "threads")


@dataclass(frozen=True)
class Plan:
    """The points, and how long each may take."""

    counts: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes
    model: list[Shape]
    probe: int
    seconds: float
    least_rounds: int
    most_rounds: int


FULL = Plan(
    counts=(1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    sizes=tuple(KIB << n for n in range(0, 23, 2)),
    model=gpt2(),
    probe=PROBE,
    seconds=1.0,
    least_rounds=6,
    most_rounds=60,
)
QUICK = Plan((1, 10, 100), (KIB, 64 * KIB, 1024 * KIB), gpt2(24), 1 << 16, 0.02, 2, 4)


@dataclass(frozen=True)
class Point:
    """What one side took: microseconds with their spread, and torch's time over it, paired.

    `side` is torch, fastclip or one of torch's own operations (`RATES`), for which `n_bytes` is
    that of the one tensor it worked on."""

    sweep: str
    side: str
    clips: bool
    n_tensors: int
    n_bytes: int
    dtype: str
    threads: int
    rounds: int
    us_p20: float
    us: float
    us_p80: float
    ratio_p20: float | None = None
    ratio: float | None = None
    ratio_p80: float | None = None


# Gradients


class Turn(NamedTuple):
    """What one call works on: gradients, left alone and clipped, or one tensor and a target."""

    problems: tuple[Problem, Problem]
    source: Tensor
    target: Tensor


class Turns:
    """Each call works on the next of several turns of the same size: with enough of them it finds
    nothing in a cache. A clip is undone after the call, for the same reason.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._next = cycle(turns)
        self._now = turns[0]

    def clips(self) -> list[Side]:
        return [
            self._clip(name, call, clips) for clips in (False, True) for name, call in CALLS.items()
        ]

    def rates(self) -> list[Side]:
        return [
            Side(name, partial(self._operate, operation), self._turn)
            for name, operation in RATES.items()
        ]

    def _turn(self) -> None:
        self._now = next(self._next)

    def _operate(self, operation: Operation) -> object:
        return operation(self._now.source, self._now.target)

    def _clip(self, name: str, call: Callable[..., Tensor], clips: bool) -> Side:
        def run() -> Tensor:
            problem = self._now.problems[clips]
            return call(problem.parameters, problem.max_norm)

        def check(norm: Tensor) -> None:
            self._now.problems[clips].settle(name, norm)

        return Side(name + CLIPPED * clips, run, self._turn, check)


def copies(n_bytes: int, cache: int, calls: int) -> int:
    """How many buffers of `n_bytes` take turns in `calls` calls so that none is found in a cache:
    eight times the cache lies between two calls on one, or none is called twice."""
    return min(1 + 8 * cache // n_bytes, calls)


# Sweeps


def by_tensors(plan: Plan) -> Iterator[Point]:
    for count in plan.counts:
        grads = gradients(many(count, TINY))
        turns = Turns([Turn(both(grads), grads[0], grads[0])])
        yield from race("tensors", grads, turns.clips(), plan)


def by_bytes(plan: Plan, cache: int) -> Iterator[Point]:
    calls = (2 * len(CALLS) + len(RATES)) * (1 + plan.most_rounds)  # one round to warm up
    for n_bytes in plan.sizes:
        if 2 * n_bytes > 0.7 * available():
            print(f"{size(n_bytes)}: left out, memory is short", file=sys.stderr)
            continue
        sources = gradients([(n_bytes // 4,)] * copies(n_bytes, cache, calls))
        turns = Turns([Turn(both(s.chunk(PARTS)), s, torch.ones_like(s)) for s in sources])
        torch.ones(cache).sum()  # four times the cache: nothing of the above is left in it
        sides = [*turns.clips(), *turns.rates()]
        yield from race("bytes", sources[0].chunk(PARTS), sides, plan, probed=n_bytes)


def by_threads(plan: Plan, most: int) -> Iterator[Point]:
    grads = gradients(plan.model)
    turns = Turns([Turn(both(grads), torch.ones(plan.probe), torch.ones(plan.probe))])
    sides = [*turns.clips(), *turns.rates()]
    for threads in threads_up_to(most):
        torch.set_num_threads(threads)
        yield from race("threads", grads, sides, plan, probed=4 * plan.probe)


def threads_up_to(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    powers = [1 << n for n in range(most.bit_length())]
    return sorted({*(count for count in powers if count < most), most})


def race(
    sweep: str, grads: Sequence[Tensor], sides: list[Side], plan: Plan, probed: int = 0
) -> Iterator[Point]:
    """All sides at one size; `probed` is the bytes of the tensors that torch's operations take."""
    start = perf_counter()
    interleave(sides, rounds=1)  # warm-up
    spent = perf_counter() - start
    rounds = rounds_for(spent, plan.seconds, plan.least_rounds, plan.most_rounds)
    seconds = interleave(sides, rounds)
    n_bytes = sum(grad.nbytes for grad in grads)
    for side in sides:
        times = spread([1e6 * s for s in seconds[side.name]])
        name, clips = side.name.removesuffix(CLIPPED), side.name.endswith(CLIPPED)
        place = (sweep, name, clips)
        how = ("float32", torch.get_num_threads(), rounds)
        if name in RATES:
            yield Point(*place, 1, probed, *how, *times)
            continue
        theirs = seconds["torch" + CLIPPED * clips]
        ratios = spread(paired_ratios(seconds[side.name], theirs))
        yield Point(*place, len(grads), n_bytes, *how, *times, *ratios)


# Report


HEADER = (
    f"{'sweep':<9}{'tensors':>8}{'bytes':>10}{'threads':>8}  {'side':<17}"
    f"{'median':>13}  {'20 - 80 %':<24}{'ratio':>7}"
)


def line(point: Point) -> str:
    ends = f"{point.us_p20:,.1f} - {point.us_p80:,.1f}"
    ratio = "" if point.ratio is None or point.side == "torch" else f"{point.ratio:.2f}x"
    rate = "" if point.side not in RATES else f"{point.n_bytes / point.us / 1e3:.1f} GB/s"
    return (
        f"{point.sweep:<9}{point.n_tensors:>8,}{size(point.n_bytes):>10}{point.threads:>8}  "
        f"{point.side + CLIPPED * point.clips:<17}{point.us:>10,.1f} us  {ends:<22}"
        f"{ratio or rate:>9}"
    ).rstrip()


def size(n_bytes: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", KIB**2), ("KiB", KIB)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes} B"


def fitted(points: Sequence[Point]) -> Iterator[str]:
    """Fixed cost and slope of each side in the first two sweeps, in words."""
    for sweep, along in (("tensors", "n_tensors"), ("bytes", "n_bytes")):
        if not any(p.sweep == sweep for p in points):
            continue
        for clips in (False, True):
            for side in CALLS:
                chosen = [p for p in points if (p.sweep, p.side) == (sweep, side)]
                chosen = [p for p in chosen if p.clips == clips]
                found = fit([getattr(p, along) for p in chosen], [p.us for p in chosen])
                name = f"{sweep:<9}{side + CLIPPED * clips:<18}"
                if found.slope <= 0:
                    yield f"{name}the slope cannot be told: the times do not grow"
                    continue
                slope = f"{found.slope:.3f} us a tensor"
                if sweep == "bytes":
                    slope = f"bytes at {1e-3 / found.slope:.1f} GB/s"
                yield (
                    f"{name}{found.fixed:>7.1f} us + {slope}"
                    f" (within {found.off:.0%} of each median)"
                )


def available() -> int:
    """Bytes of memory that can be had; where /proc does not tell, all of it."""
    path = Path("/proc/meminfo")
    if path.exists():
        for entry in path.read_text().splitlines():
            if entry.startswith("MemAvailable:"):
                return int(entry.split()[1]) * KIB
    return machine.describe().memory_gib * GIB


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    plan = QUICK if args.quick else FULL
    here = machine.describe()
    others = machine.Others()
    torch.set_num_threads(here.cores)
    points: list[Point] = []
    print(HEADER)
    for point in _points(args.sweep, plan, machine.last_level_bytes(), here.cores):
        points.append(point)
        print(line(point), flush=True)
    if not args.quick and (fits := list(fitted(points))):
        print("\nfixed cost and slope, the least squares of relative errors:", *fits, sep="\n")
    idle = others.idleness()
    if complaint := idle.complaint():
        print(f"warning: {complaint}", file=sys.stderr)
    whole = not args.quick and set(args.sweep) == set(SWEEPS)
    path = args.csv or (RESULTS / "scaling.csv" if whole else None)
    if path is not None:
        about = {"kernels": kernels(), "busy_cores": idle.busy_cores, "region_us": idle.region_us}
        write(path, [{**asdict(here), **asdict(point), **about} for point in points])
    return 0


def _points(sweeps: Sequence[str], plan: Plan, cache: int, most: int) -> Iterator[Point]:
    if "tensors" in sweeps:
        yield from by_tensors(plan)
    if "bytes" in sweeps:
        yield from by_bytes(plan, cache)
    if "threads" in sweeps:
        yield from by_threads(plan, most)


def kernels() -> str:
    """The backend for CPU tensors, and its SIMD level where it has one."""
    name = backends.choose(torch.device("cpu")).name
    return f"{name} ({native.simd()})" if name == "cpu" else name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description="What a clip costs by number of tensors, by bytes and by threads.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=SWEEPS, help="default: all")
    where = "default: results/scaling.csv of a full run, nothing of a quick or a partial one"
    parser.add_argument("--csv", type=Path, metavar="PATH", help=where)
    return parser


if __name__ == "__main__":
    sys.exit(main())
