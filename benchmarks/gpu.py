"""`python -m benchmarks.gpu`: the backends for GPUs against torch, apex and TransformerEngine.

Needs torch for the GPU, numpy, what the backends need (triton, nvcc), and matplotlib for the
pictures. Ends within eight minutes: after `SECONDS` no further work is begun, and what is left out
is named. Writes ``results/gpu-<card>.csv``, a row for each competitor on each work, and draws
``docs/gpu-<card>-*.svg`` from it. How it is timed: `gpu_clock`.

Has not run on a GPU yet; its tests run it on a CPU that plays the card.
"""

import argparse
import gc
import importlib.metadata
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import gpu_session, gpu_sides, plots
from benchmarks.gpu_session import Card, Row, Session
from benchmarks.gpu_works import FULL, QUICK
from benchmarks.records import RESULTS, write
from fastclip.benchmarking.machine import describe

SECONDS = 380.0  # of the 480 of `make bench-gpu`: what is begun last takes some, and drawing
PACKAGES = ("triton", "apex", "transformer_engine")


def main(arguments: Sequence[str] | None = None, card: Card | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if card is None:
        if not torch.cuda.is_available():
            print("benchmarks.gpu: torch finds no CUDA device here", file=sys.stderr)
            return 2
        card = Card(torch.cuda.get_device_name())
    rows, faults = _run(card, args)
    if not rows:
        parser.error("no work was measured")
    path = args.csv or RESULTS / f"gpu-{slug(card.name)}.csv"
    write(path, [{**row, **facts(card)} for row in rows])
    print(f"wrote {path}")
    drawn = plots.main(["--gpu", str(path), "--folder", str(args.pictures)])
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else drawn


def _run(card: Card, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    begin = time.monotonic()
    plan = QUICK if args.quick else FULL
    absent = gpu_sides.missing()
    for name, reason in absent.items():
        print(f"{name}: left out, {reason}")
    session = Session(card, plan, gpu_session.limits(card, plan.probe), absent)
    found = session.limits
    print(
        f"{card.name}: reads at {found.read / 1e9:.0f} GB/s, scales in place at "
        f"{found.scale / 1e9:.0f}, copies at {found.copy / 1e9:.0f}; torch {torch.__version__}"
    )
    print(HEADER)
    rows: list[Row] = []
    for work in plan.works:
        if time.monotonic() - begin > args.seconds:
            print(f"{work.name}, {work.dtype}: left out, {args.seconds:.0f} s are over")
        elif not card.has_room_for(work):
            print(f"{work.name}, {work.dtype}: left out, {work.n_bytes:,} bytes are too many")
        else:
            for row in session.measure(work):
                rows.append(row)
                print(line(row), flush=True)
            gc.collect()
            card.cuda.empty_cache()
    return rows, session.faults


HEADER = (
    f"{'work':<20}{'dtype':<10}{'bytes':>15}  {'competitor':<20}{'device':>11}{'host':>12}"
    f"{'ratio':>7}"
)


def line(row: Row) -> str:
    clipped = " clipped" if row["clips"] else ""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    return (
        f"{row['workload']}{clipped:<{20 - len(str(row['workload']))}}{row['dtype']:<10}"
        f"{row['n_bytes']:>15,}  {row['side']:<20}{row['us']:>8.1f} us{row['host_us']:>9.1f} us"
        f"{ratio:>7}"
    )


def facts(card: Card) -> Row:
    """What a committed number is worth nothing without."""
    about = describe()
    return {
        "card": card.name,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        **{name: _version(name) for name in PACKAGES},
        "date": about.date,
        "commit": about.commit,
        "cpu": about.cpu,
        "python": about.python,
    }


def slug(name: str) -> str:
    """NVIDIA H200 becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="The backends for GPUs against torch, apex and TransformerEngine.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="no work is begun later; default 380"
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="default: results/gpu-<card>.csv")
    parser.add_argument("--pictures", type=Path, default=plots.DOCS, help="the folder for them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
