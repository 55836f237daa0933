"""`python -m benchmarks.cpu`: fastclip against torch on the CPU, as ratios of the same run."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import fastclip
from benchmarks.recording import Recording
from benchmarks.rows import ROWS
from fastclip.benchmarking import memory, report
from fastclip.benchmarking.memory import DTYPES

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
    recording = Recording(say, quick=args.quick, threads=args.threads, backend=args.backend)
    rows = {row.name: row for row in ROWS}
    unmeasurable = memory.why_not()
    for name in chosen:
        if name in rows:
            if reason := recording.why_not(rows[name]):
                say(f"{name}: {reason}")
            else:
                recording.race(rows[name])
        elif unmeasurable is None:
            recording.memory(name.removeprefix("memory-"))
    if unmeasurable is not None and set(chosen) & set(MEMORY_ROWS):
        say(f"not measured: {unmeasurable}")
    return recording.finish()


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
