"""The fault laboratory: break a small training run on purpose, and see what comes of it.

    python -m examples.fault_lab                       # all faults, one seed: a minute on two cores
    python -m examples.fault_lab --fault nan-gradient --seeds 10

Each fault strikes a run of `examples.train`'s model on the same text, at a step that the seed
chooses, and the run is left to itself: a Monitor watches it, and Recovery takes it back where its
policy says so. The table tells what was seen and done, and compares the validation loss at the end
with that of the same run without a fault. Exit status 1 if a promise is not kept (`broken`).

A fault of the data strikes whenever its batch is used, so skipping the batch is what helps. All
others end with the first rollback, as a bit that flipped does: what would come back in every
attempt, no rollback can cure, and it ends when `max_rollbacks` are used up.

fp16 is emulated: linear layers compute in float32 and round their outputs, and the gradients of
those, to float16, with its overflow. That is what tensor cores do; float16 matrix products of the
CPU take ten times as long. The GradScaler is torch's.
"""

import argparse
import csv
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.fault_run import Fault, Outcome, Run
from fastclip.monitor import JSONL

TOLERANCE = 0.02  # of the final loss against the clean run's


def nothing(run: "Run") -> None:
    """Of the clean runs, and of faults of the data."""


def scaled_gain(run: "Run") -> None:
    """The gain of a layer norm is 100,000 times what it was: the layer behind it gets inputs that
    bfloat16 holds and float16 does not."""
    with torch.no_grad():
        run.model.get_parameter("blocks.0.norm_2.weight").mul_(1e5)


def nan_gradient(run: "Run") -> None:
    gradient = run.model.get_parameter("blocks.0.mlp.0.weight").grad
    assert gradient is not None
    gradient[0, 0] = math.nan


def exploding_rate(run: "Run") -> None:
    run.multiply_rate(300.0)


def growing_rate(run: "Run") -> None:
    run.multiply_rate(1.05 ** (run.step - run.at + 1))


def huge_loss(run: "Run") -> None:
    """What goes backward is a wrong multiple of the loss: float16 overflows at any scale."""
    run.factor = 1e12


CLEAN = (
    Fault("none", "forward", nothing),
    Fault("none-fp16", "forward", nothing, fp16=True),
    Fault("none-ranks", "forward", nothing, ranks=2),
)
FAULTS = (
    Fault("corrupted-batch", "batch", nothing),
    Fault("exploding-lr", "update", exploding_rate, once=False),
    Fault("fp16-overflow", "forward", scaled_gain, fp16=True),
    Fault("nan-gradient", "update", nan_gradient, rolls_back=False),
    Fault("slow-divergence", "update", growing_rate, once=False, onset_within=200),
    Fault("dying-loss-scale", "forward", huge_loss, once=False, fp16=True),
    Fault("poisoned-rank", "batch", nothing, ranks=2),
)


Curve = list[tuple[int, int, float]]  # attempt, step, loss


def one(fault: Fault, seed: int, folder: str) -> tuple[Outcome, Curve]:
    """A run, from beginning to end."""
    torch.set_num_threads(1)
    here = Path(folder) / f"{fault.name}-{seed}"
    here.mkdir(exist_ok=True)
    run = Run(fault, seed, here)
    run.go()
    if fault.ranks > 1:
        dist.barrier()
    records = JSONL(here / "run.jsonl")
    return run.outcome(), [(each.attempt, each.step, _number(each.loss)) for each in records]


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def as_rank(
    rank: int, faults: Sequence[Fault], seeds: Sequence[int], folder: str
) -> list[tuple[Outcome, Curve]]:
    """All runs of several ranks, as one of those."""
    size = faults[0].ranks
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return [one(fault, seed, folder) for seed in seeds for fault in faults]
    finally:
        dist.destroy_process_group()


def run_all(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[Outcome, Curve]]:
    """The faults of these names and the clean runs to compare with, in two processes."""
    faults = [fault for fault in FAULTS if fault.name in names]
    faults = [clean for clean in CLEAN if any(clean.like(each) for each in faults)] + faults
    single = [fault for fault in faults if fault.ranks == 1]
    several = [fault for fault in faults if fault.ranks > 1]
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(2) as pool:
        jobs = [(fault, seed, folder) for seed in seeds for fault in single]
        found = pool.starmap(one, jobs, chunksize=1)
        if several:
            pair = [(rank, several, seeds, folder) for rank in range(2)]
            found += pool.starmap(as_rank, pair, chunksize=1)[0]
    return _compared(found)


def _compared(found: Sequence[tuple[Outcome, Curve]]) -> list[tuple[Outcome, Curve]]:
    """With the loss of the clean run in each; ordered as the faults are."""
    faults = {fault.name: fault for fault in (*CLEAN, *FAULTS)}
    losses = {(each.fault, each.seed): each.final for each, _ in found}
    compared = []
    for outcome, curve in found:
        clean = next(each for each in CLEAN if each.like(faults[outcome.fault]))
        outcome = outcome._replace(clean=losses[clean.name, outcome.seed])
        compared.append((outcome, curve))
    order = list(faults)
    return sorted(compared, key=lambda pair: (order.index(pair[0].fault), pair[0].seed))


def broken(outcome: Outcome) -> list[str]:
    """The promises that were not kept."""
    fault = next(each for each in (*CLEAN, *FAULTS) if each.name == outcome.fault)
    if fault in CLEAN:
        return [] if outcome.detected is None else [f"alarm of {outcome.detector}"]
    late = -1 if outcome.onset is None else outcome.onset - outcome.injected
    excess = outcome.final / outcome.clean - 1
    promises = {
        "not detected": outcome.detected is not None and outcome.detected >= outcome.injected,
        f"onset {late} steps after the injection": 0 <= late <= fault.onset_within,
        f"{outcome.rollbacks} rollbacks": outcome.rollbacks == fault.rolls_back,
        f"final loss {excess:+.1%}": abs(excess) <= TOLERANCE,
    }
    return [text for text, kept in promises.items() if not kept]


def tables(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """What was seen and what came of it: one line per fault, over its seeds; steps count from the
    injection."""
    seen, came = ([head, "|---" * head.count(" | ") + "|---|"] for head in (SEEN, CAME))
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.fault == name]
        excess = [100 * (each.final / each.clean - 1) for each in group]
        cells = [
            said(each.detector for each in group),
            span(each.detected - each.injected for each in group if each.detected is not None),
            span(each.onset - each.injected for each in group if each.onset is not None),
            said(each.onset_metric for each in group),
            said(each.named for each in group),
            response(group),
            said(f"{o.symptom}, {o.boundary}" for o in group if o.symptom != "none"),
            f"{min(excess):+.2f} to {max(excess):+.2f}",
            f"{sum(not broken(each) for each in group)} of {len(group)}",
        ]
        seen.append(f"| {' | '.join([name, *cells[:5]])} |")
        came.append(f"| {' | '.join([name, *cells[5:]])} |")
    return "\n".join(seen), "\n".join(came)


SEEN = "| fault | first seen by | at | onset | in | named |"
CAME = "| fault | what was done | diagnosis | final loss, % over clean | promises kept |"


def said(words: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(word for word in words if word)) or "-"


def span(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    if not found:
        return "-"
    return f"+{found[0]}" if found[0] == found[-1] else f"+{found[0]} to +{found[-1]}"


def response(group: Sequence[Outcome]) -> str:
    if any(each.rollbacks for each in group):
        at = span(each.decided - each.injected for each in group if each.decided is not None)
        rank = " of rank 1" if all("rank" in each.skipped for each in group) else ""
        return f"rolled back at {at}, batches{rank} skipped"
    skipped = max(each.skipped_steps for each in group)
    return f"{skipped} step skipped" if skipped else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.fault_lab", description="Break a training run on purpose."
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--fault", choices=names, action="append", help="default: all of them")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="an outcome per line")
    parser.add_argument("--curves", type=Path, metavar="PATH", help="losses of the first seed")
    options = parser.parse_args(arguments)
    found = run_all(options.fault or names, range(options.seeds))
    outcomes = [outcome for outcome, _ in found]
    if options.csv:
        write(options.csv, Outcome._fields, outcomes)
    if options.curves:
        lines = [(o.fault, *point) for o, curve in found if o.seed == 0 for point in curve]
        write(options.curves, ("fault", "attempt", "step", "loss"), lines)
    print(*tables(outcomes), sep="\n\n")
    faults = [(outcome, text) for outcome in outcomes for text in broken(outcome)]
    for outcome, text in faults:
        print(f"{outcome.fault}, seed {outcome.seed}: {text}", file=sys.stderr)
    return 1 if faults else 0


def write(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow(f"{each:.6g}" if isinstance(each, float) else each for each in row)


def read(path: Path) -> list[Outcome]:
    """What `--csv` wrote, to six digits."""
    with path.open(newline="") as file:
        return [Outcome(**{n: _value(n, row[n]) for n in row}) for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    if name in ("final", "clean"):
        return float(text)
    if isinstance(Outcome._field_defaults.get(name), str) or name == "fault":
        return text
    return int(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
