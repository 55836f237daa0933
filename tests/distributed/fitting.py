"""Training runs, in one process and with FSDP2 on several, that should come out the same."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from fastclip import GradClipper, rules
from tests import training
from tests.distributed import layouts, models

# Warm-ups that are over after a few steps; each rule binds at some steps and not at others.
RULES: dict[str, rules.Rule] = {
    "MaxNorm": rules.MaxNorm(1.0),
    "ZClip": rules.ZClip(alpha=0.9, z=1.0, warmup=6, max_norm=3.0),
    "LogZ": rules.LogZ(k=1.0, halflife=20, warmup=6, max_norm=5.0),
    "AutoClip": rules.AutoClip(percentile=60.0, window=25),
    "AdaGC": rules.AdaGC(ratio=1.05, beta=0.9, warmup=6, max_norm=2.0),
    "AGC": rules.AGC(clip_factor=0.05),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw-fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    # torch's fused SGD takes no DTensors
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}
SPIKE = 15.0  # times the loss at every 11th step
BAD = 17  # the step of which the loss is NaN


class Run(NamedTuple):
    """Of one rank."""

    losses: list[float]  # of the whole batch
    decided: list[dict[str, Any]]
    values: dict[str, Tensor]  # whole
    moments: dict[str, Tensor]  # whole, by parameter number and name
    scales: list[float]
    counters: tuple[int, ...]
    state: dict[str, Any]  # of the clipper


class Training:
    """A model, its optimizer and its clipper; `size` 0 is one process without process groups."""

    def __init__(
        self, size: int, kind: str, rule: str, dtype: torch.dtype, scaled: bool, layout: str
    ) -> None:
        self.size = size
        self.model: nn.Module = models.net(dtype)
        self.index, self.shares = 0, 1
        if size and layout == "fsdp":
            self.index, self.shares = dist.get_rank(), size
            layouts.shard(self.model, layouts.mesh(size))
        elif size:
            over = layouts.mesh(size // 2, 2, names=("dp", "tp"))
            layouts.tensor_parallel(self.model, over["tp"])
            layouts.shard(self.model, over["dp"])
            self.index, self.shares = over["dp"].get_local_rank(), size // 2
        self.optimizer: Optimizer = OPTIMIZERS[kind](list(self.model.parameters()))
        self.clipper = GradClipper(self.model, rule=RULES[rule])
        self.scaler = training.make_scaler() if scaled else None

    def step(self, number: int) -> tuple[float, dict[str, Any], float]:
        data = models.part(number, self.index, self.shares)
        loss = layouts.loss(self.model, data)
        factor = SPIKE if number % 11 == 10 else 1.0
        if number == BAD and self.index == self.shares - 1:
            factor = math.nan
        self.optimizer.zero_grad()
        scaler: GradScaler | None = self.scaler
        (loss * factor if scaler is None else scaler.scale(loss * factor)).backward()
        stats = self.clipper.step(self.optimizer, scaler=scaler)
        if scaler is not None:
            scaler.update()
        decided = {
            name: getattr(stats, name).clone()
            for name in ("total_norm", "threshold", "coef", "skipped", "norms")
        }
        return float(loss.detach()), decided, 0.0 if scaler is None else scaler.get_scale()

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": layouts.whole(value)
            for number, parameter in enumerate(self.model.parameters())
            for name, value in self.optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def finished(self, steps: list[tuple[float, dict[str, Any], float]]) -> Run:
        losses = torch.tensor([loss for loss, _, _ in steps], dtype=torch.float64)
        if self.size:
            dist.all_reduce(losses)
            losses /= self.size
        return Run(
            losses.tolist(),
            [decided for _, decided, _ in steps],
            {name: layouts.whole(value) for name, value in self.model.named_parameters()},
            self.moments(),
            [scale for _, _, scale in steps],
            training.counted(self.clipper),
            self.clipper.state_dict(),
        )


def run(
    size: int,
    steps: int,
    kind: str,
    rule: str = "MaxNorm",
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    layout: str = "fsdp",
) -> Run:
    made = Training(size, kind, rule, dtype, scaled, layout)
    return made.finished([made.step(number) for number in range(steps)])


def resumed(size: int, steps: int, rule: str) -> tuple[list[str], list[str]]:
    """How a run whose clipper is replaced half-way, by one that loads its state, differs from one
    that goes through; and how the last states do."""
    through, halted = (
        Training(size, "adamw-fused", rule, torch.float64, False, "fsdp") for _ in range(2)
    )
    ends = []
    for made in (through, halted):
        made.step(0)
        for number in range(1, steps):
            if made is halted and number == steps // 2:
                state = made.clipper.state_dict()
                made.clipper = GradClipper(made.model, rule=RULES[rule])
                made.clipper.load_state_dict(state)
            made.step(number)
        ends.append((layouts.held(made.model), made.clipper.state_dict()))
    (values, state), (own_values, own_state) = ends
    return training.differences(values, own_values), training.differences(state, own_state)
