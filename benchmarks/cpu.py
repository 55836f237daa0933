"""`python -m benchmarks.cpu`: fastclip against torch on the CPU, as ratios of the same run."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

import fastclip
from benchmarks.rows import ROWS
from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import machine, memory, report
from fastclip.benchmarking.contest import FULL, QUICK
from fastclip.benchmarking.memory import DTYPES, MemoryResult
from fastclip.benchmarking.runner import Result, run

MEMORY_ROWS = [f"memory-{dtype}" for dtype in DTYPES]
NAMES = [*(row.name for row in ROWS), *MEMORY_ROWS]
BIG = {row.name for row in ROWS if row.big}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    chosen = [name for name in NAMES if args.filter in name and (args.all or name not in BIG)]
    if not chosen:
        parser.error(f"no row's name contains {args.filter!r}; rows: {', '.join(NAMES)}")
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    if args.check and args.quick:
        parser.error("--check judges the full sizes; --quick shrinks them")
    if args.csv is not None and not args.csv.absolute().parent.is_dir():
        parser.error(f"the folder of --csv {args.csv} does not exist")
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        if args.backend:
            try:
                stack.enter_context(fastclip.backend(args.backend))
            except RuntimeError as error:
                parser.error(str(error))
        done = _run(args, chosen)
    if args.csv is not None:
        report.write_csv(args.csv, done)
    if args.json:
        print(report.as_json(done))
    missed = [result.name for result in done.results if result.met is False]
    return 1 if args.check and missed else 0


def _run(args: argparse.Namespace, chosen: list[str]) -> report.Run:
    say = _say_to(sys.stderr if args.json else sys.stdout)
    here = machine.describe()
    backend, kernels = _backend()
    if args.threads > here.cores:
        say(f"warning: {args.threads} threads on {here.cores} cores")
    others = machine.Others()
    time.sleep(0.5)
    before = others.idleness()
    _warn(say, before)
    if args.quick:
        say("quick: small sizes and a few rounds prove that it runs; the ratios mean nothing")
    say(report.heading(here, backend, kernels))
    results = []
    others = machine.Others()
    for name in chosen:
        result = _result(name, args)
        if result is not None:
            results.append(result)
            say("\n".join([report.line(result), *report.peer_lines(result)]))
    say(report.footing(results))
    if reason := _memory_missing(chosen):
        say(f"not measured: {reason}")
    during = others.idleness()
    _warn(say, during)
    return report.Run(here, backend, kernels, before, during, results)


def _result(name: str, args: argparse.Namespace) -> Result | MemoryResult | None:
    if name not in MEMORY_ROWS:
        row = next(row for row in ROWS if row.name == name)
        # Targets are for full sizes: a small one measured against them would only mislead.
        return run(replace(row, at_least=None), QUICK) if args.quick else run(row, FULL)
    if memory.why_not() is not None:
        return None
    dtype = name.removeprefix("memory-")
    return memory.run_in_child(dtype, args.threads, args.backend, args.quick)


def _memory_missing(chosen: list[str]) -> str | None:
    return memory.why_not() if set(chosen) & set(MEMORY_ROWS) else None


def _backend() -> tuple[str, str]:
    """The backend's name, and what runs under it."""
    name = backends.choose(torch.device("cpu")).name
    return name, f"C++ ({native.simd()})" if name == "cpu" else "plain PyTorch"


def _warn(say: Callable[[str], None], idle: machine.Idleness) -> None:
    if complaint := idle.complaint():
        say(f"warning: {complaint}; load average {idle.load_average:.2f}")


def _say_to(stream: TextIO) -> Callable[[str], None]:
    return lambda text: print(text, file=stream, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description="fastclip against torch on the CPU, as ratios of the same run.",
        epilog=f"rows: {', '.join(NAMES)}; with --all only: {', '.join(sorted(BIG))}",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--filter", default="", metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--all", action="store_true", help="also the lists that take long")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write one row a workload")
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--backend", metavar="NAME", help="instead of the automatic choice")
    parser.add_argument("--check", action="store_true", help="exit 1 if a row misses its target")
    return parser


if __name__ == "__main__":
    sys.exit(main())
