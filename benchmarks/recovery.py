"""What recovery costs the training loop.

    python -m benchmarks.recovery                  # a table
    python -m benchmarks.recovery --csv benchmarks/results/recovery.csv
    python -m benchmarks.recovery --check          # exit status 1 if a target is missed

`handle` without an event: under 20 us a step. For a model with AdamW of 1 to 50 million parameters
(times 12 bytes): `stall`, how long an asynchronous save keeps the loop from going on, has to be
less than `copy`, a copy of the state to the host's memory, from 100 MB on (below, the millisecond
that lists and names take is more than the copy); `write` is how long after that the
checkpoint is on disk; `sync` is a save that is not asynchronous; `load` restores, checksums
verified. Rounds are interleaved; the second save is the first that counts, since the buffers of the
first are used again.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastclip.benchmarking import machine
from fastclip.monitor import Recovery

WIDTHS = {1: 1000, 10: 3162, 50: 7071}  # of a square layer with so many million parameters
TARGET_US = 20.0
LARGE_MB = 100
CALLS = 10_000
COLUMNS = ("copy", "stall", "write", "sync", "load")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def state(width: int, device: str) -> dict[str, Any]:
    model = nn.Linear(width, width, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def handle_us(folder: Path) -> float:
    """The median of the fastest fifth of the rounds: others may be at work."""
    recovery = Recovery(folder, state(10, "cpu"))
    next(recovery.steps(2))

    def calls() -> None:
        for _ in range(CALLS):
            recovery.handle([])

    times = sorted(seconds(calls) / CALLS for _ in range(10))
    return statistics.median(times[:2]) * 1e6


def save_ms(folder: Path, width: int, device: str, rounds: int) -> dict[str, float]:
    parts = state(width, device)
    kinds = {
        kind: Recovery(folder / kind, parts, every=1 << 30, asynchronous=kind == "async")
        for kind in ("sync", "async")
    }
    for recovery in kinds.values():
        next(recovery.steps(1 << 29))
    tensors = kinds["sync"]._contents.pack().tensors

    def copy() -> None:
        copies = [tensor.to("cpu", copy=True) for tensor in tensors.values()]
        assert len(copies) == len(tensors)

    times: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for step in range(1, rounds + 2):
        for recovery in kinds.values():
            recovery._step = step  # as if it had been taken
        times["copy"].append(seconds(copy))
        times["stall"].append(seconds(kinds["async"].save))
        times["write"].append(seconds(kinds["async"]._store.wait))
        times["sync"].append(seconds(kinds["sync"].save))
        for recovery in kinds.values():
            recovery._store.remove([step - 1])
    times["load"] = [seconds(kinds["sync"].restore) for _ in range(3)]
    size = sum(tensor.nbytes for tensor in tensors.values())
    middle = {name: statistics.median(taken[1:]) * 1e3 for name, taken in times.items()}
    return {"mb": size / 1e6, **middle}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--check", action="store_true", help="status 1 if a target is missed")
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most", type=int, default=50, help="million parameters at most")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    others = machine.Others()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        us = handle_us(Path(folder) / "handle")
        for millions, width in WIDTHS.items():
            if millions <= arguments.most:
                target = Path(folder) / f"{millions}"
                costs = save_ms(target, width, device, arguments.rounds)
                rows.append({"device": device, "millions": millions, **costs})
    print(f"handle without an event: {us:.2f} us (target {TARGET_US:g})")
    print(f"{'parameters':>12}{'state':>10}" + "".join(f"{name:>9}" for name in COLUMNS) + "   ms")
    for row in rows:
        times = "".join(f"{row[name]:>9.1f}" for name in COLUMNS)
        print(f"{row['millions']:>10} M{row['mb']:>7.0f} MB{times}")
    busy = others.busy_cores()
    if busy is not None and busy > machine.BUSY_CORES:
        print(f"warning: other programs kept {busy:.2f} cores busy", file=sys.stderr)
    if arguments.csv:
        _write(arguments.csv, [{"handle_us": us, **row} for row in rows], busy)
    missed = us > TARGET_US or any(r["stall"] >= r["copy"] for r in rows if r["mb"] >= LARGE_MB)
    return int(arguments.check and missed)


def _write(path: Path, rows: list[dict[str, Any]], busy: float | None) -> None:
    about = {**asdict(machine.describe()), "busy_cores": None if busy is None else round(busy, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({**rounded, **about})


if __name__ == "__main__":
    sys.exit(main())
