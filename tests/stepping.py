"""Rules taken through steps of given norms."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastclip.rules import AGC, AdaGC, AutoClip, Decision, LogZ, MaxNorm, Measured, Rule, ZClip

CPU = torch.device("cpu")

# Every rule, and with short warm-ups, so that a short run sees all of it.
RULES: dict[str, Rule] = {
    "max-norm": MaxNorm(1.0),
    "max-norm-tensor": MaxNorm(torch.tensor(1.0)),
    "max-norm-schedule": MaxNorm(lambda step: 2.0 / (1 + step)),
    "agc": AGC(),
    "adagc": AdaGC(warmup=3),
    "adagc-uncapped": AdaGC(warmup=3, max_norm=None),
    "adagc-cold": AdaGC(warmup=0),
    "zclip": ZClip(warmup=3),
    "zclip-uncapped": ZClip(warmup=3, max_norm=None),
    "logz": LogZ(warmup=3, k=2.0),
    "logz-capped": LogZ(warmup=3, k=2.0, max_norm=1.0),
    "autoclip": AutoClip(percentile=30.0, window=4),
    "autoclip-capped": AutoClip(percentile=30.0, window=4, max_norm=1.0),
}


def measured(
    norms: Sequence[float] | Tensor, step: int = 0, inv_scale: float | None = None
) -> Measured:
    """Gradients of two rows with these norms, for parameters of ones."""
    rows = torch.as_tensor(norms, dtype=torch.float64)
    parameters = [torch.ones(2, 3) for _ in norms]
    gradients = [(row / math.sqrt(6) * torch.ones(2, 3)).float() for row in rows]
    scale = None if inv_scale is None else torch.tensor(inv_scale)
    return Measured(rows.square().sum().sqrt(), rows, step, parameters, gradients, scale)


def of_total(total: float | Tensor, step: int = 0) -> Measured:
    value = torch.as_tensor(total, dtype=torch.float64)
    return Measured(value, value[None], step, [], [], None)


def run(rule: Rule, totals: Iterable[float | Tensor]) -> list[Decision]:
    """The decisions of a rule for the global norm."""
    state = rule.init(1, CPU)
    decisions = []
    for step, total in enumerate(totals):
        decisions.append(rule.decide(of_total(total, step), state))
        state = decisions[-1].state
    return decisions


def run_rows(rule: Rule, steps: Iterable[Sequence[float] | Tensor]) -> list[Decision]:
    """The decisions of any rule for tensors of these norms."""
    decisions: list[Decision] = []
    for step, norms in enumerate(steps):
        state = decisions[-1].state if decisions else rule.init(len(norms), CPU)
        decisions.append(rule.decide(measured(norms, step), state))
    return decisions


def log_normal(steps: int, *shape: int, spikes: float = 0.05, level: float = 0.5) -> Tensor:
    """Random norms around `level`, some of them 10 to 10,000 times as large."""
    norms = level * torch.randn(steps, *shape, dtype=torch.float64).mul(0.3).exp()
    factor = 10 ** torch.empty_like(norms).uniform_(1, 4)
    return torch.where(torch.rand_like(norms) < spikes, norms * factor, norms)
