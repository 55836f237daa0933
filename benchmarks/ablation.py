"""`python -m benchmarks.ablation`: what one corrupted batch does to a training run, by rule.

A small transformer learns the text of Python's own help (`pydoc_data.topics`), a character at a
time, with AdamW. At one step the targets are random characters and the loss counts a hundred times.
From there on each run goes on twice, with that batch and with a sound one. Every rule has its
defaults, and for one seed all see the same model, batches and noise.

Writes ``benchmarks/results/ablation.csv``, a row a run, and ``ablation-curves.csv``, from which
`benchmarks.ablation_plot` draws the picture in docs/clipping-rules.md.
"""

import argparse
import copy
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

import fastclip
from benchmarks.gpt import GPT
from benchmarks.text import VOCABULARY, batch, text
from fastclip.benchmarking import machine
from fastclip.rules import AGC, AdaGC, AutoClip, LogZ, MaxNorm, Rule, ZClip

RESULTS = Path(__file__).parent / "results"

RULES: dict[str, Callable[[], Rule] | None] = {
    "no clipping": None,
    "MaxNorm(1.0)": lambda: MaxNorm(1.0),
    "AGC": AGC,
    "AdaGC": AdaGC,
    "ZClip": ZClip,
    "LogZ": LogZ,
    "AutoClip": AutoClip,
}
FACTOR = 100.0  # of the corrupted loss
WITHIN = 1.02  # of the level before: recovered
LEVEL = 10  # evaluations before the event that make the level, and at the end the final loss
SETTLED = 5  # evaluations whose mean has to be within
NEXT = 20  # steps from the event on in which its peak is looked for
SHOWN = 20  # steps before the event that the curves begin with

CONTEXT = 64
PRINTABLE = (32, 127)


@dataclass(frozen=True)
class Plan:
    """Steps before the corrupted one, steps from it on, runs and the model's width."""

    before: int
    after: int
    seeds: int
    width: int = 64
    batch: int = 16


FULL = Plan(before=200, after=200, seeds=5)
QUICK = Plan(before=LEVEL, after=LEVEL, seeds=1, width=32, batch=2)


@dataclass(frozen=True)
class Run:
    """One rule and seed. Losses are means over validation text, in nats a character.

    `before`: just before the event; `peak`: the highest of the `NEXT` steps from it on;
    `recovery`: steps from the event until five losses on end are within 2 % of `before` on average,
    None if they never are; `final` and `final_sound`: the last ones, with the corrupted batch and
    without; `norm` and `norm_corrupted`: of gradients before clipping, the median before the event
    and at it.
    """

    rule: str
    seed: int
    before: float
    peak: float
    recovery: int | None
    final: float
    final_sound: float
    norm: float
    norm_corrupted: float


class Training:
    """A run that can be copied and gone on with."""

    def __init__(self, rule: Rule | None, seed: int, plan: Plan) -> None:
        torch.manual_seed(seed)
        self.model = GPT(plan.width, blocks=2, vocabulary=VOCABULARY, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.99))
        self.clipper = fastclip.GradClipper(self.model, rule=rule) if rule else None
        self.text, self.held_out = text()
        self.random = torch.Generator().manual_seed(seed)
        self.size = plan.batch
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.judged_by = batch(self.held_out, self.size, CONTEXT, torch.Generator().manual_seed(0))

    def step(self, corrupted: bool = False) -> None:
        """One step, and the validation loss after it."""
        inputs, targets = batch(self.text, self.size, CONTEXT, self.random)
        noise = torch.randint(*PRINTABLE, targets.shape, generator=self.random)
        loss = self._loss(inputs, noise) * FACTOR if corrupted else self._loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clipper is None:
            norm = fastclip.grad_stats(self.model).total_norm
            self.optimizer.step()
        else:
            norm = self.clipper.step(self.optimizer).total_norm
        self.norms.append(float(norm))
        with torch.no_grad():
            self.losses.append(float(self._loss(*self.judged_by)))

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


Losses = tuple[list[float], list[float]]  # of all steps, with the corrupted batch and without


def run(name: str, seed: int, plan: Plan) -> tuple[Run, Losses]:
    """What came of one rule."""
    make = RULES[name]
    training = Training(None if make is None else make(), seed, plan)
    for _ in range(plan.before):
        training.step()
    sound = copy.deepcopy(training)
    for number in range(plan.after):
        training.step(corrupted=number == 0)
        sound.step()
    return judged(name, seed, plan.before, training, sound), (training.losses, sound.losses)


def judged(name: str, seed: int, event: int, training: Training, sound: Training) -> Run:
    losses, before = training.losses, mean(training.losses[event - LEVEL : event])
    return Run(
        rule=name,
        seed=seed,
        before=before,
        peak=max(losses[event : event + NEXT]),
        recovery=recovery(losses[event:], before),
        final=mean(losses[-LEVEL:]),
        final_sound=mean(sound.losses[-LEVEL:]),
        norm=median(training.norms[:event]),
        norm_corrupted=training.norms[event],
    )


def recovery(losses: Sequence[float], level: float) -> int | None:
    for step in range(len(losses) - SETTLED + 1):
        if mean(losses[step : step + SETTLED]) <= WITHIN * level:
            return step
    return None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def curves(plan: Plan, every: dict[str, list[Losses]]) -> list[dict[str, object]]:
    """Per rule and step, counted from the event: the loss, the least, median and most of all seeds;
    and by how much it is over that with a sound batch, the median of all seeds.
    """
    rows: list[dict[str, object]] = []
    for rule, runs in every.items():
        for number in range(max(plan.before - SHOWN, 0), plan.before + plan.after):
            values = [losses[number] for losses, _ in runs]
            ends = {"low": min(values), "median": median(values), "high": max(values)}
            excess = median(losses[number] - sound[number] for losses, sound in runs)
            place = {"rule": rule, "step": number - plan.before}
            rows.append({**place, **rounded({**ends, "excess": excess})})
    return rows


def table(rows: Sequence[dict[str, str]]) -> str:
    """Of the rows of the CSV: one line a rule, medians and in brackets least and most of all
    seeds.
    """
    lines = [
        "| rule | before | peak | steps to recover | final | final without it |",
        "|---|---|---|---|---|---|",
    ]
    for rule in dict.fromkeys(row["rule"] for row in rows):
        runs = [row for row in rows if row["rule"] == rule]
        losses = [
            spread([float(one[name]) for one in runs], ".3f")
            for name in ("before", "peak", "final", "final_sound")
        ]
        steps = spread([float(one["recovery"] or "inf") for one in runs], ".0f")
        before, peak, *finals = losses
        lines.append(f"| {rule} | {before} | {peak} | {steps} | {' | '.join(finals)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: str) -> str:
    low, middle, high = (format(v, digits) for v in (min(values), median(values), max(values)))
    text = middle if low == high else f"{middle} ({low} to {high})"
    return text.replace("inf", "never")


def rounded(fields: Mapping[str, object]) -> dict[str, object]:
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in fields.items()}


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    plan = QUICK if args.quick else replace(FULL, seeds=args.seeds)
    torch.set_num_threads(1)  # the model is too small for more
    here = asdict(machine.describe())
    rows: list[dict[str, object]] = []
    losses: dict[str, list[Losses]] = {}
    for rule in RULES:
        for seed in range(plan.seeds):
            one, own = run(rule, seed, plan)
            rows.append({**rounded(asdict(one)), **here})
            losses.setdefault(rule, []).append(own)
            print(f"{rule}, seed {seed}: peak {one.peak:.3f}", file=sys.stderr, flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder / "ablation.csv", rows)
    write(args.folder / "ablation-curves.csv", curves(plan, losses))
    print(table(read(args.folder / "ablation.csv")))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description="What one corrupted batch does to a training run, by rule.",
    )
    parser.add_argument("--seeds", type=int, default=FULL.seeds, metavar="N", help="default 5")
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run?")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSVs go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
