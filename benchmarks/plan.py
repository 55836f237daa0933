"""What the host does per step for the Triton backend, on CPU tensors with the launches left out.

    python -m benchmarks.plan                  # a table
    python -m benchmarks.plan --csv benchmarks/results/NAME.csv
    python -m benchmarks.plan --check          # exit status 1 if a hit costs more than 0.5 us

Three costs for lists of 1 to 5,000 gradients: `hit` (the gradients lie where they lay), `moved`
(new addresses: one upload), `new` (sizes never seen: the plan is built). Not in them: the launches
themselves and, on a GPU, pinned memory and the call that starts the copy.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from fastclip.backends.triton_plan import Grid, Plans
from fastclip.benchmarking import machine

COUNTS = (1, 10, 100, 148, 500, 1000, 2000, 5000)
GRID = Grid(528)  # an H200's
TARGET_US = 0.5  # a gradient, at 2,000 of them


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Microseconds, the median of the fastest fifth of the rounds: others may be at work."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return typical(times)


def typical(times: Sequence[float]) -> float:
    """Of seconds the microseconds, as in `fastest`."""
    return statistics.median(sorted(times)[: max(1, len(times) // 5)]) * 1e6


def costs(n: int) -> dict[str, float]:
    plans = Plans()
    lists = [[torch.empty(1024) for _ in range(n)] for _ in range(2)]
    turn = iter(range(1 << 30))

    def find(grads: list[Tensor]) -> None:
        assert plans.find(grads, GRID) is not None

    find(lists[0])
    rounds = max(20, min(500, 400_000 // n // 2))
    return {
        "hit": fastest(lambda: find(lists[0]), rounds),
        "moved": fastest(lambda: find(lists[next(turn) % 2]), rounds),
        "new": fastest(lambda: Plans().find(lists[0], GRID), max(5, rounds // 20)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--check", action="store_true", help="status 1 above the target")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    others = machine.Others()
    rows = []
    for n in COUNTS:
        rows.append({"gradients": n, **{name: round(us, 2) for name, us in costs(n).items()}})
    for row in rows:
        row["hit_per_gradient"] = round(row["hit"] / row["gradients"], 4)
        row["moved_per_gradient"] = round(row["moved"] / row["gradients"], 4)
    print(f"{'gradients':>10}{'hit':>10}{'moved':>10}{'new':>12}   us; a gradient: hit, moved")
    for row in rows:
        print(
            f"{row['gradients']:>10}{row['hit']:>10.1f}{row['moved']:>10.1f}{row['new']:>12.1f}"
            f"   {row['hit_per_gradient']:.3f}, {row['moved_per_gradient']:.3f}"
        )
    busy = others.busy_cores()
    if busy is not None and busy > machine.BUSY_CORES:
        print(f"warning: other programs kept {busy:.2f} cores busy", file=sys.stderr)
    if arguments.csv:
        _write(arguments.csv, rows, busy)
    at_2000 = next(row["hit_per_gradient"] for row in rows if row["gradients"] == 2000)
    print(f"a hit on 2,000 gradients: {at_2000:.3f} us a gradient (target {TARGET_US})")
    return int(arguments.check and at_2000 > TARGET_US)


def _write(path: Path, rows: list[dict[str, float]], busy: float | None) -> None:
    about = {**asdict(machine.describe()), "busy_cores": None if busy is None else round(busy, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
