"""What the Monitor adds to a training step on the host, and of what that is made.

    python -m benchmarks.telemetry             # a table, and results/telemetry.csv
    python -m benchmarks.telemetry --check     # exit status 1 if a step costs more than 50 us

`observe` is one call with a loss, the statistics of 300 or 2,000 gradients and two settings of the
optimizer, under the default detectors with a lag of two steps, without a sink. Of that: `given`,
what was passed is looked at; `begun`, copies are begun; `read`, a record is made of copies;
`judged`, bands and detectors; the rest is the queue. `layers` are the rows of layers, built once
in 100 steps, for each of those. All on the CPU: on a GPU the copies take two launches and three
asynchronous copies of the driver's time on top, which are not in here.
"""

import argparse
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fastclip
from benchmarks import records
from benchmarks.plan import fastest, typical
from fastclip.benchmarking import machine
from fastclip.monitor import Monitor, Telemetry
from fastclip.monitor.layers import merged
from fastclip.monitor.monitor import KEPT
from fastclip.monitor.observed import given
from fastclip.monitor.telemetry import Row

LAYERS = (300, 2000)
SETTINGS = ("loss", "lr", "loss_scale")
LAG = 2
EVERY = 100  # records to one with rows of layers
KEPT_ROWS = 12  # whose copies are held: those that are queued, and those before an event
ROUNDS = 2000
TARGET_US = 50


def statistics_of(layers: int) -> fastclip.GradStats:
    parameters = {f"layer.{i}.weight": torch.nn.Parameter(torch.zeros(8)) for i in range(layers)}
    for parameter in parameters.values():
        parameter.grad = torch.ones(8)
    return fastclip.GradClipper(parameters.items(), 1e9).clip_()


def steps_of(layers: int) -> Iterator[dict[str, Any]]:
    """What is passed to observe, step by step, with the noise of a healthy run."""
    stats = statistics_of(layers)
    noise = random.Random(0)
    for step in count():
        loss = torch.tensor(2 + noise.gauss(0, 0.03), requires_grad=True) * 1
        norm = torch.tensor(noise.lognormvariate(0, 0.25))
        stats = replace(stats, total_norm=norm)
        yield {"step": step, "stats": stats, "loss": loss, "lr": 1e-3, "loss_scale": 1024.0}


def costs(layers: int) -> dict[str, float]:
    """Microseconds a step of each part."""
    steps, monitor = steps_of(layers), Monitor(telemetry=Telemetry(LAG, layers_every=EVERY))
    for _ in range(KEPT):  # from here on as many states are dropped as are made
        monitor.observe(**next(steps))
    ready = [next(steps) for _ in range(ROUNDS)]
    turn = iter(ready)
    found = {"observe": fastest(lambda: monitor.observe(**next(turn)), ROUNDS)}
    found.update(parts(ready))
    return found


def parts(ready: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each part, in the order in which a step goes through them."""
    judging, queue = Monitor(), deque[Row]()
    seconds: dict[str, list[float]] = {name: [] for name in ("given", "begun", "read", "judged")}
    now = time.perf_counter
    for fields in (*ready, *ready):
        start = now()
        one = given(fields["step"], fields["stats"], (), {n: fields[n] for n in SETTINGS})
        taken = now()
        queue.append(Row(one))
        begun = now()
        if len(queue) <= KEPT_ROWS:
            continue
        before = now()
        record = queue[-1 - LAG].record()
        read = now()
        judging.replay([record])
        judged = now()
        queue.popleft()
        times = (taken - start, begun - taken, read - before, judged - read)
        for name, spent in zip(seconds, times, strict=True):
            seconds[name].append(spent)
    found = {name: typical(times[KEPT:]) for name, times in seconds.items()}
    found["layers"] = fastest(lambda: merged(source() for source in queue[0].layers), 200) / EVERY
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path, default=records.RESULTS / "telemetry.csv")
    parser.add_argument("--check", action="store_true", help="status 1 above the target")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what a collection goes through is this program's, not torch's
    others = machine.Others()
    rows = [{"layers_of_model": layers, **costs(layers)} for layers in LAYERS]
    busy = others.busy_cores()
    print("".join(f"{name:>16}" for name in rows[0]), "  us a step")
    for row in rows:
        print(
            f"{row['layers_of_model']:>16}"
            + "".join(f"{us:>16.1f}" for us in list(row.values())[1:])
        )
    if busy is not None and busy > machine.BUSY_CORES:
        print(f"warning: other programs kept {busy:.2f} cores busy", file=sys.stderr)
    about = {**asdict(machine.describe()), "busy_cores": None if busy is None else round(busy, 2)}
    records.write(arguments.csv, [{**row, **about} for row in rows])
    worst = max(row["observe"] + row["layers"] for row in rows)
    print(f"at most {worst:.1f} us a step with the rows of layers (target {TARGET_US})")
    return int(arguments.check and worst > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
