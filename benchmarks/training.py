"""`python -m benchmarks.training`: what clipping costs in a real training step, on the CPU.

A GPT learns the text of Python's own help, a character at a time, with fused AdamW: without
clipping, with torch's clip, with `fastclip.clip_grad_norm_`, and with `GradClipper.step`. The four
take every step in turn, odd steps in reverse order, from the same weights on the same batches, so
that their times can be compared step by step and the losses of those that clip have to agree.

Writes ``benchmarks/results/training.csv``, a row a variant, and ``training-curves.csv``, a row a
step and variant; a quick run only into the folder that ``--folder`` names.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

import fastclip
from benchmarks.gpt import GPT
from benchmarks.text import VOCABULARY, batch, text
from fastclip import backends
from fastclip.benchmarking import machine
from fastclip.benchmarking.measure import no_garbage_collection, paired_ratios, spread

RESULTS = Path(__file__).parent / "results"

NONE, TORCH = "no clipping", "torch"
FUNCTION, STEP = "fastclip.clip_grad_norm_", "GradClipper.step"
VARIANTS = (NONE, TORCH, FUNCTION, STEP)
MAX_NORM = 1.0
LEARNING_RATE = 3e-4  # at 1e-3 losses jump, and a difference in the last digit grows to 0.08 nats
TOLD = 20  # steps between two lines of progress
CLOSE = 0.01  # nats: by so much losses may differ from torch's


@dataclass(frozen=True)
class Plan:
    """`warm_up` steps train as all others do, but their times do not count."""

    steps: int
    warm_up: int
    width: int
    blocks: int
    context: int
    batch: int


FULL = Plan(steps=100, warm_up=5, width=512, blocks=3, context=64, batch=4)
QUICK = Plan(steps=6, warm_up=2, width=32, blocks=1, context=16, batch=2)


@dataclass
class Training:
    """One variant's model and optimizer, and what became of every step. Seconds of `step` are of
    all of it, those of `update` of what follows the backward pass."""

    plan: Plan
    variant: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # before clipping; NaN where nobody asked
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        plan = self.plan
        self.model = GPT(plan.width, plan.blocks, VOCABULARY, plan.context)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        self.clipper = fastclip.GradClipper(self.model, MAX_NORM)
        self.update: Callable[[], Tensor] = {
            NONE: self._unclipped,
            TORCH: self._by_torch,
            FUNCTION: self._by_function,
            STEP: self._by_step,
        }[self.variant]

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        after_backward = time.perf_counter()
        norm = self.update()
        end = time.perf_counter()
        self.losses.append(loss.item())
        self.norms.append(float(norm))
        self.step_s.append(end - start)
        self.update_s.append(end - after_backward)

    def _unclipped(self) -> Tensor:
        self.optimizer.step()
        return torch.tensor(math.nan)

    def _by_torch(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        return norm

    def _by_function(self) -> Tensor:
        norm = fastclip.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        return norm

    def _by_step(self) -> Tensor:
        return self.clipper.step(self.optimizer).total_norm


def train(plan: Plan) -> dict[str, Training]:
    """Every variant, step by step in turn."""
    runs = {name: Training(plan, name) for name in VARIANTS}
    learned, _ = text()
    random = torch.Generator().manual_seed(0)
    with no_garbage_collection():
        for number in range(plan.steps):
            inputs, targets = batch(learned, plan.batch, plan.context, random)
            for name in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                runs[name].step(inputs, targets)
            if (number + 1) % TOLD == 0:
                print(f"{number + 1} of {plan.steps} steps", file=sys.stderr, flush=True)
    return runs


def farthest(run: Training, other: Training) -> float:
    """The largest difference of two loss curves, in nats; a NaN counts as infinite."""
    differences = [abs(a - b) for a, b in zip(run.losses, other.losses, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def require_same_training(runs: dict[str, Training]) -> None:
    """Times of trainings that differ must not become numbers."""
    for name in (FUNCTION, STEP):
        apart = farthest(runs[name], runs[TORCH])
        if not apart <= CLOSE:
            raise RuntimeError(
                f"the losses of {name} and of torch's clip differ by up to {apart:.3g} nats, "
                f"more than {CLOSE}"
            )


def summary(runs: dict[str, Training]) -> list[dict[str, object]]:
    """A row a variant. `clip` is what a step takes longer after the backward pass than the one
    without clipping, `share` that of the whole step."""
    return [_summary(run, runs[NONE], runs[TORCH]) for run in runs.values()]


def _summary(run: Training, unclipped: Training, torchs: Training) -> dict[str, object]:
    first = run.plan.warm_up
    step, torch_step = run.step_s[first:], torchs.step_s[first:]
    update, plain = run.update_s[first:], unclipped.update_s[first:]
    clip = [a - b for a, b in zip(update, plain, strict=True)]
    share = [a / b for a, b in zip(clip, step, strict=True)]
    clips = run.variant != NONE
    return {
        "variant": run.variant,
        **_spread("step_ms", [1e3 * seconds for seconds in step]),
        **_spread("update_ms", [1e3 * seconds for seconds in update]),
        **(_spread("clip_ms", [1e3 * seconds for seconds in clip]) if clips else {}),
        **({"clip_share": _digits(median(share))} if clips else {}),
        **_spread("torch_step_over_step", paired_ratios(step, torch_step)),
        "last_loss": _digits(run.losses[-1]),
        **({"farthest_from_torch": _digits(farthest(run, torchs))} if clips else {}),
        "clipped_steps": sum(norm > MAX_NORM for norm in run.norms) if clips else 0,
        **asdict(run.plan),
        "tokens": run.plan.batch * run.plan.context,
        "parameters": sum(p.numel() for p in run.parameters),
        "tensors": len(run.parameters),
    }


def curves(runs: dict[str, Training]) -> list[dict[str, object]]:
    """A row a step and variant; `norm` is that before clipping."""
    return [
        {
            "step": number,
            "variant": run.variant,
            "loss": round(run.losses[number], 6),
            "norm": None if run.variant == NONE else _digits(run.norms[number]),
            "step_ms": _digits(1e3 * run.step_s[number]),
            "update_ms": _digits(1e3 * run.update_s[number]),
        }
        for number in range(next(iter(runs.values())).plan.steps)
        for run in runs.values()
    ]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Of the rows of `summary`."""
    lines = [f"{'variant':<26}{'step':>10}{'20 - 80 %':>18}{'clipping':>12}{'share':>8}{'loss':>8}"]
    for row in rows:
        ends = f"{row['step_ms_low']:.1f} - {row['step_ms_high']:.1f}"
        clip = f"{row['clip_ms']:.2f} ms{row['clip_share']:>8.1%}" if "clip_ms" in row else ""
        lines.append(
            f"{row['variant']:<26}{row['step_ms']:>7.1f} ms{ends:>18}{clip:>20}"
            f"{row['last_loss']:>8.3f}"
        )
    return "\n".join(lines)


def _spread(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = spread(values)
    return {name: _digits(middle), f"{name}_low": _digits(low), f"{name}_high": _digits(high)}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _write(path: Path, rows: list[dict[str, object]], about: dict[str, object]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description="What clipping costs in a real training step, on the CPU.",
    )
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run?")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--folder", type=Path, help="where the CSVs go (default: results/, nowhere if quick)"
    )
    args = parser.parse_args(arguments)
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    torch.set_num_threads(args.threads)
    backend = backends.choose(torch.device("cpu")).name
    others = machine.Others()
    runs = train(QUICK if args.quick else FULL)
    idle = others.idleness()
    require_same_training(runs)
    rows = summary(runs)
    print(table(rows))
    apart = max(farthest(runs[name], runs[TORCH]) for name in (FUNCTION, STEP))
    print(f"losses of those that clip: at most {apart:.2g} nats apart from torch's")
    if complaint := idle.complaint():
        print(f"warning: {complaint}", file=sys.stderr)
    busy = None if idle.busy_cores is None else round(idle.busy_cores, 3)
    about = {**asdict(machine.describe()), "backend": backend, "busy_cores": busy}
    folder = args.folder or (None if args.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "training.csv", rows, about)
        _write(folder / "training-curves.csv", curves(runs), about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
