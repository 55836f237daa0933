"""A run of the fault laboratory: the model, the loop, and what became of it."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples.train import GPT, Text, cross_entropy
from fastclip import GradClipper, GradStats
from fastclip.distributed import Attribution, attribution_hook
from fastclip.monitor import (
    JSONL,
    ActivationWatch,
    Event,
    Monitor,
    ParameterWatch,
    Recovery,
    RobustSpike,
    RollbackPolicy,
    compare_precisions,
    default_detectors,
    diagnose,
)

STEPS, WARM_UP = 340, 30
BATCH, CONTEXT = 8, 32
PEAK = 1e-2  # learning rate

Batch = tuple[Tensor, Tensor]


class Fault(NamedTuple):
    """`inject(run)` is called in each step from the injection on, up to the first rollback:
    before the ``forward`` pass or before the ``update``; with ``batch``, `Run.batch` does it."""

    name: str
    where: str
    inject: Callable[["Run"], None]
    once: bool = True  # in the step of the injection only
    fp16: bool = False
    ranks: int = 1
    rolls_back: bool = True  # otherwise the clipper skips the step
    onset_within: int = 0  # steps after the injection

    def like(self, other: "Fault") -> bool:
        """Whether a run without `other` is one without this."""
        return (self.fp16, self.ranks) == (other.fp16, other.ranks)


def calls_for_rollback(event: Event) -> bool:
    """Whatever the run will not get over alone. Not NaNs in gradients of a step that was skipped
    (they did no harm, and the loss scale may cure them), nor norms that are large: they are
    clipped."""
    if event.kind == "nonfinite":
        return event.metric == "loss" or event.level == "critical"
    return event.metric != "grad_norm" and event.kind != "clip_rate"


def schedule(step: int) -> float:
    return min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


@cache
def text() -> Text:
    return Text()


class Outcome(NamedTuple):
    """What became of a fault; steps are those of the run, `final` and `clean` validation losses."""

    fault: str
    seed: int
    injected: int
    detected: int | None = None  # the step of the first event
    detector: str = ""
    onset: int | None = None
    onset_metric: str = ""
    named: str = ""  # the parameter, module or rank
    rollbacks: int = 0
    decided: int | None = None  # the step that was rolled back
    target: int | None = None
    skipped: str = ""  # batches
    skipped_steps: int = 0  # by the clipper
    symptom: str = ""
    boundary: str = ""
    final: float = math.nan
    clean: float = math.nan  # of the same run without the fault


class Run:
    """One run with one fault, on this rank."""

    def __init__(self, fault: Fault, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        self.fault, self.seed, self.at = fault, seed, 150 + 3 * seed
        self.rank = dist.get_rank() if fault.ranks > 1 else 0
        self.step, self.factor, self.rounding = 0, 1.0, fault.fp16
        self.model = GPT(text().vocabulary, width=48, layers=1)
        for module in self.model.modules():
            if fault.fp16 and isinstance(module, nn.Linear):
                module.register_forward_hook(self.rounded)
        self.parameters = ParameterWatch(self.model, every=1)
        self.wrapped: nn.Module = self.model
        watches: list[Any] = [self.parameters]
        if fault.ranks > 1:  # activations are each rank's own: what all decide by has none of them
            self.wrapped = DistributedDataParallel(self.model)
            self.attribution = Attribution(self.wrapped)
            self.wrapped.register_comm_hook(self.attribution, attribution_hook)
        else:
            watches.append(ActivationWatch(self.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=fault.fp16)
        self.clipper = GradClipper(self.model, max_norm=1.0)
        self.log = JSONL(folder / "run.jsonl") if self.rank == 0 else None
        self.monitor = Monitor(
            [*default_detectors(), RobustSpike("update_ratio", k=10, log=True)],
            sinks=[self.log] if self.log else [],
            watches=watches,
        )
        names = ("model", "optimizer", "scheduler", "scaler", "clipper", "monitor")
        self.recovery = Recovery(
            folder / "checkpoints",
            {name: getattr(self, name) for name in names},
            RollbackPolicy(calls_for_rollback, confirm=50, lr_steps=40, ranks=self.blamed),
            every=50,
        )
        self.events: list[Event] = []
        self.named = ""

    def rounded(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.half().float() if self.rounding else output

    def batch(self, number: int) -> Batch:
        """Inputs and targets, ``[BATCH, CONTEXT]``; the batch at fault is random characters."""
        place = self.fault.ranks * number + self.rank
        inputs, targets = (
            part[:BATCH, :CONTEXT] for part in text().batch(10**6 * self.seed + place)
        )
        if self.fault.where == "batch" and number == self.at and self.rank == self.fault.ranks - 1:
            noise = torch.Generator().manual_seed(self.seed)
            shape = (BATCH, CONTEXT)
            inputs, targets = torch.randint(text().vocabulary, (2, *shape), generator=noise)
        return inputs, targets

    def strikes(self, where: str) -> bool:
        due = self.step == self.at if self.fault.once else self.step >= self.at
        return self.fault.where == where and due and not self.recovery.rollbacks

    def multiply_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:  # until the scheduler sets it again
            group["lr"] *= factor

    def go(self) -> None:
        for step, number in self.recovery.steps(STEPS):
            self.step, self.factor = step, 1.0
            if self.strikes("forward"):
                self.fault.inject(self)
            self.optimizer.zero_grad()
            batch = self.batch(number)
            loss = cross_entropy(self.wrapped, batch)
            self.scaler.scale(loss * self.factor).backward()
            if self.strikes("update"):
                self.fault.inject(self)
            fields = {"lr": self.optimizer.param_groups[0]["lr"] * self.recovery.lr_scale}
            if self.fault.fp16:
                fields["loss_scale"] = self.scaler.get_scale()
            with self.parameters:
                stats = self.clipper.step(self.optimizer, self.scaler)
            self.scaler.update()
            self.scheduler.step()
            loss = self.averaged(loss.detach())
            events = self.monitor.observe(step=step, loss=loss, stats=stats, batch=number, **fields)
            if events and not self.events:
                self.look(stats, batch)
            self.events += events
            self.recovery.handle(events)
        self.monitor.close()

    def averaged(self, loss: Tensor) -> Tensor:
        if self.fault.ranks > 1:
            dist.all_reduce(loss)
        return loss / self.fault.ranks

    def look(self, stats: GradStats, batch: Batch) -> None:
        """What a person would ask after the first alarm: which parameters, module, ranks?"""
        self.named = ", ".join(stats.nonfinite()[:1])
        if self.fault.ranks > 1:
            self.named = ", ".join(f"rank {rank}" for rank in self.guilty(0))
        elif self.fault.fp16:
            self.rounding = False
            found = compare_precisions(self.model, lambda: cross_entropy(self.model, batch))
            self.rounding = True
            modules = {name: report.nonfinite for name, report in found.items()}
            self.named = ", ".join(f"{m} in {name}" for name, m in modules.items() if m is not None)

    def guilty(self, ago: int) -> list[int]:
        """The ranks whose gradients were not finite, or long beside those of others, so many steps
        `ago`. A collective."""
        found = self.attribution.by_rank(-1 - ago)
        least = min(each.norm for each in found)
        return [each.rank for each in found if each.nonfinite or each.norm > 2 * least]

    def blamed(self, event: Event) -> list[int] | None:
        """Of the policy: whose batches are to be skipped."""
        if self.fault.ranks == 1 or event.onset is None or self.step - event.onset >= 16:
            return None
        return self.guilty(self.step - event.onset) or None

    def outcome(self) -> Outcome:
        """A collective."""
        with torch.no_grad():
            losses = [self.loss_of(batch) for batch in text().validation_batches()]
        records = list(JSONL(self.folder / "run.jsonl"))
        found = diagnose(records)
        outcome = Outcome(
            self.fault.name,
            self.seed,
            self.at,
            named=self.named,
            rollbacks=len(self.recovery.rollbacks),
            skipped=self.skipped(),
            skipped_steps=sum(record.skipped is True for record in records),
            symptom=found.symptom,
            boundary=found.boundary,
            final=torch.stack(losses).mean().item(),
        )
        return outcome._replace(**(self.first_alarm() | self.first_rollback()))

    def first_alarm(self) -> dict[str, Any]:
        if not self.events:
            return {}
        event = self.events[0]
        return {
            "detected": event.step,
            "detector": f"{event.kind} of {event.metric}",
            "onset": event.onset,
            "onset_metric": event.onset_metric,
        }

    def first_rollback(self) -> dict[str, Any]:
        """Its onset is what counts: that of the events that called for it."""
        if not self.recovery.rollbacks:
            return {}
        back = self.recovery.rollbacks[0]
        calls = [e for e in self.events if e.step == back.step and calls_for_rollback(e)]
        return {
            "onset": back.onset,
            "onset_metric": calls[0].onset_metric,
            "decided": back.step,
            "target": back.target,
        }

    def loss_of(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return cross_entropy(self.model, (inputs[:, :CONTEXT], targets[:, :CONTEXT]))

    def skipped(self) -> str:
        """The batches, and on several ranks of which. A collective, which also compares them."""
        mine = ranges(self.recovery.skipped)
        if self.fault.ranks == 1:
            return mine
        state = [p.tolist() for p in self.model.parameters()]
        every: list[Any] = [None] * self.fault.ranks
        dist.all_gather_object(every, (mine, state))
        if any(theirs != state for _, theirs in every):
            raise RuntimeError(f"{self.fault.name}, seed {self.seed}: the ranks have parted")
        return "; ".join(f"rank {n}: {batches}" for n, (batches, _) in enumerate(every) if batches)


def ranges(numbers: Sequence[int]) -> str:
    """3, 4, 5, 9 is 3-5, 9."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
