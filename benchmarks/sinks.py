"""`python -m benchmarks.sinks`: what a record costs in each of the Monitor's sinks.

The time of `write` for records a millisecond apart, in a folder for temporary files: of 13 numbers
(`numbers`), and with rows of 148 layers as in GPT-2 small (`layers`). W&B is in offline mode and
MLflow's store is local files, sent to every second; the console is a pipe, or a terminal of 100
columns that discards what it is told. `close_ms` is what `close` takes after all records.

    python -m benchmarks.sinks --csv benchmarks/results/sinks.csv
"""

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.records import write as write_csv
from fastclip.benchmarking import machine
from fastclip.monitor import JSONL, Console, LayerRow, MLflow, StepRecord, TensorBoard, WandB

COUNTS = {"numbers": 2000, "layers": 200}  # records
LAYERS = 148
PAUSE = 1e-3  # seconds


def records(kind: str, count: int) -> Iterator[StepRecord]:
    rows = tuple(LayerRow(f"block.{i}.weight", 0.1 * i, 0.01, 0.0) for i in range(LAYERS))
    for step in range(count):
        x = 1 + step / count
        yield StepRecord(
            step,
            *(2.0 * x, 2.1 * x, 0.5 * x, 0.9, True, 3e-4, 65536.0, 0, False, 9.0 * x, 99.0, 1e-3),
            layers=rows if kind == "layers" else None,
        )


def sinks() -> dict[str, Callable[[Path], Any]]:
    from rich.console import Console as Rich

    def terminal(folder: Path) -> Console:
        return Console(console=Rich(file=io.StringIO(), force_terminal=True, width=100))

    return {
        "JSONL": lambda folder: JSONL(folder / "run.jsonl"),
        "TensorBoard": TensorBoard,
        "WandB": lambda folder: WandB(mode="offline", dir=str(folder)),
        "MLflow": lambda folder: MLflow(tracking_uri=folder.as_uri(), seconds=1.0),
        "Console, pipe": lambda folder: Console(console=Rich(file=io.StringIO(), width=100)),
        "Console, terminal": terminal,
    }


def measure(make: Callable[[Path], Any], kind: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sink, times = make(Path(folder)), []
        for record in records(kind, count):
            start = time.perf_counter()
            sink.write(record, [])
            times.append((time.perf_counter() - start) * 1e6)
            time.sleep(PAUSE)
        start = time.perf_counter()
        sink.close()
        closing = (time.perf_counter() - start) * 1e3
    del times[: count // 10]  # the first ones open files and fill caches
    return {
        "us": statistics.median(times),
        "us_mean": statistics.fmean(times),
        "us_worst": max(times),
        "close_ms": closing,
    }


@contextmanager
def quiet_clients() -> Iterator[None]:
    told = {
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    before = dict(os.environ)
    os.environ.update(told)
    yield
    os.environ.clear()
    os.environ.update(before)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--quick", action="store_true", help="few records: only that it runs")
    args = parser.parse_args(arguments)
    others, rows = machine.Others(), []
    print(f"{'sink':<20}{'record':<10}{'us':>10}{'mean':>10}{'worst':>12}{'close, ms':>12}")
    with quiet_clients():
        for name, make in sinks().items():
            for kind, count in COUNTS.items():
                cost = measure(make, kind, 5 if args.quick else count)
                rows.append({"sink": name, "record": kind, **cost})
                print(
                    f"{name:<20}{kind:<10}{cost['us']:>10.1f}{cost['us_mean']:>10.1f}"
                    f"{cost['us_worst']:>12.1f}{cost['close_ms']:>12.1f}"
                )
    busy = others.busy_cores()
    if busy is not None and busy > machine.BUSY_CORES:
        print(f"warning: other programs kept {busy:.2f} cores busy", file=sys.stderr)
    if args.csv:
        about = {**asdict(machine.describe()), "busy_cores": busy}
        write_csv(args.csv, [{**row, **about} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
