"""What the watches of a Monitor cost on the CPU.

    python -m benchmarks.watches                # a table, and benchmarks/results/watches.csv
    python -m benchmarks.watches --quick        # small models, nothing is written

`forward`: the forward pass of a small GPT and of an MLP, as it is, with the hooks of an
ActivationWatch in a step that it leaves out, and in one that it measures, `take` included. `step`:
that of a fused AdamW, as it is, in a block of a ParameterWatch that it leaves out, and in one that
it measures. Sides take turns; ratios are of the same round.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT
from fastclip.benchmarking import machine
from fastclip.benchmarking.measure import Side, interleave, paired_ratios, spread
from fastclip.monitor import ActivationWatch, ParameterWatch

RESULTS = Path(__file__).parent / "results" / "watches.csv"
PLAIN, OFF, ON = "plain", "watched, left out", "watched, measured"
NEVER = 10**9  # steps, so that none is measured
VOCABULARY = 8192


@dataclass(frozen=True)
class Size:
    gpt: tuple[int, int, int, int]  # width, blocks, context, batch
    mlp: tuple[int, int, int]  # width, layers, batch
    rounds: int


FULL = Size(gpt=(384, 6, 128, 4), mlp=(1024, 24, 32), rounds=16)
QUICK = Size(gpt=(32, 1, 16, 2), mlp=(32, 2, 4), rounds=4)


def models(size: Size) -> dict[str, tuple[nn.Module, Tensor]]:
    """Each with an input."""
    torch.manual_seed(0)
    width, blocks, context, batch = size.gpt
    tokens = torch.randint(0, VOCABULARY, (batch, context))
    across, depth, rows = size.mlp
    layers = [part for _ in range(depth) for part in (nn.Linear(across, across), nn.ReLU())]
    return {
        f"GPT {blocks} x {width}": (GPT(width, blocks, VOCABULARY, context), tokens),
        f"MLP {depth} x {across}": (nn.Sequential(*layers), torch.randn(rows, across)),
    }


class Forward:
    """The hooks are there while their side has its turn."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model, self._x = model, x
        self._watch: ActivationWatch | None = None

    def sides(self) -> list[Side]:
        return [
            Side(PLAIN, lambda: self._model(self._x)),
            Side(OFF, self._watched, lambda: self._begin(NEVER), lambda taken: self._end(taken, 0)),
            Side(ON, self._watched, lambda: self._begin(1), lambda taken: self._end(taken, 1)),
        ]

    def _begin(self, every: int) -> None:
        self._watch = ActivationWatch(self._model, every=every)

    def _watched(self) -> dict[str, Any]:
        assert self._watch is not None
        self._model(self._x)
        return self._watch.take()

    def _end(self, taken: dict[str, Any], expected: int) -> None:
        assert self._watch is not None
        self._watch.remove()
        if len(taken) != expected or not all(value.isfinite() for value in taken.values()):
            raise RuntimeError(f"the watch took {taken}")


def steps(model: nn.Module) -> list[Side]:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    off, on = ParameterWatch(model, every=NEVER), ParameterWatch(model, every=1)

    def step(block: Any) -> Callable[[], object]:
        def run() -> None:
            with block:
                optimizer.step()

        return run

    def check(_: object) -> None:
        if not 0 < on.take()["update_ratio"] < 1:
            raise RuntimeError("the watch saw no update")

    return [Side(PLAIN, step(nullcontext())), Side(OFF, step(off)), Side(ON, step(on), None, check)]


def rows(task: str, sides: Sequence[Side], rounds: int) -> list[dict[str, Any]]:
    """One for each side."""
    interleave(sides, 2)  # the first calls build and allocate
    seconds = interleave(sides, rounds)
    return [
        {
            **{"task": task, "side": name, "rounds": rounds},
            **_spread("ms", [1e3 * each for each in times]),
            **_spread("over_plain", paired_ratios(seconds[PLAIN], times)),
        }
        for name, times in seconds.items()
    ]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    low, middle, high = (float(f"{value:.4g}") for value in spread(values))
    return {name: middle, f"{name}_p20": low, f"{name}_p80": high}


def measured(size: Size) -> list[dict[str, Any]]:
    made = []
    for name, (model, x) in models(size).items():
        parameters = list(model.parameters())
        about = {
            "modules": len(list(model.modules())),
            "tensors": len(parameters),
            "elements": sum(parameter.numel() for parameter in parameters),
        }
        found = rows(f"forward, {name}", Forward(model, x).sides(), size.rounds)
        found += rows(f"step, {name}", steps(model), size.rounds)
        made += [{**row, **about} for row in found]
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watches", description="What watches cost, on the CPU."
    )
    parser.add_argument("--quick", action="store_true", help="small models: does it run?")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--csv", type=Path, help="default: results/watches.csv, none if quick")
    args = parser.parse_args(arguments)
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    torch.set_num_threads(args.threads)
    others = machine.Others()
    made = measured(QUICK if args.quick else FULL)
    idle = others.idleness()
    print(f"{'task':<24}{'side':<20}{'time':>12}{'over plain':>12}{'20 - 80 %':>18}")
    for row in made:
        ends = f"{row['over_plain_p20']:.3f} - {row['over_plain_p80']:.3f}"
        print(
            f"{row['task']:<24}{row['side']:<20}{row['ms']:>9.3f} ms{row['over_plain']:>12.3f}"
            f"{ends:>18}"
        )
    if complaint := idle.complaint():
        print(f"warning: {complaint}", file=sys.stderr)
    path = args.csv or (None if args.quick else RESULTS)
    if path is not None:
        busy = None if idle.busy_cores is None else round(idle.busy_cores, 3)
        about = {**asdict(machine.describe()), "busy_cores": busy}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*made[0], *about], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, **about} for row in made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
