"""Healthy runs of many kinds, made up as real logs look: loss, norm, clipping, learning rate."""

import math
import random
from collections.abc import Callable
from typing import Any

from fastclip.monitor import StepRecord


def language_model(noise: random.Random, every: int = 1, unit: float = 1.0) -> list[StepRecord]:
    """From ln(60,000) = 11 down, the norm from 15 to 0.3 in the warm-up and slowly up later, as in
    a GPT-2 of 124 million parameters; one record in `every` steps.
    """
    made = []
    for step in range(0, 3000 * every, every):
        loss = 2.2 + 6 * math.exp(-step / 60) + 1.6 * math.exp(-step / 900)
        loss += 1.2 * math.exp(-step / 6000) + noise.gauss(0, 0.04)
        norm = 0.3 + 14 * math.exp(-step / 30) + 0.1 * step / (3000 * every)
        norm *= noise.lognormvariate(0, 0.22)
        lr = 6e-4 * min(1.0, (step + 1) / 700)
        made.append(StepRecord(step, unit * loss, grad_norm=norm, lr=lr))
    return made


def restarts(noise: random.Random) -> list[StepRecord]:
    """The learning rate falls as a cosine and starts again every 1,000 steps."""
    made = []
    for step in range(4000):
        share = (1 + math.cos(math.pi * (step % 1000) / 1000)) / 2
        loss = 2 + 2 * math.exp(-step / 400) + 0.06 * share + noise.gauss(0, 0.05)
        norm = (0.4 - 0.1 * share) * noise.lognormvariate(0, 0.3)
        ratio = 1e-3 * (share + 1e-3) * noise.lognormvariate(0, 0.1)
        made.append(StepRecord(step, loss, grad_norm=norm, lr=share / 1000, update_ratio=ratio))
    return made


def fine_tuning(noise: random.Random) -> list[StepRecord]:
    """All of 200 steps."""
    return [
        StepRecord(
            step,
            0.9 + 0.8 * math.exp(-step / 20) + noise.gauss(0, 0.12),
            grad_norm=noise.lognormvariate(0.2, 0.35),
            clipped=False,
        )
        for step in range(200)
    ]


def rewards(noise: random.Random) -> list[StepRecord]:
    """Reinforcement learning: a loss below zero more often than above."""
    return [
        StepRecord(step, noise.gauss(-0.02, 0.05), grad_norm=noise.lognormvariate(-1, 0.4))
        for step in range(3000)
    ]


def small_batches(noise: random.Random) -> list[StepRecord]:
    """A loss that varies by half, a norm by factors."""
    return [
        StepRecord(
            step,
            (1 + 2 * math.exp(-step / 300)) * noise.gammavariate(4, 0.25),
            grad_norm=noise.lognormvariate(0, 0.6),
        )
        for step in range(3000)
    ]


def small_data(noise: random.Random) -> list[StepRecord]:
    """A model that learns its data by heart: loss and norm go to zero."""
    made = []
    for step in range(3000):
        fading = math.exp(-step / 150)
        loss = (2.3 * fading + 0.004) * noise.lognormvariate(0, 0.5)
        norm = (fading + 0.01) * noise.lognormvariate(0, 0.5)
        made.append(StepRecord(step, loss, grad_norm=norm))
    return made


def adversaries(noise: random.Random) -> list[StepRecord]:
    """The loss of a generator: it swings."""
    return [
        StepRecord(
            step,
            1.2 + 0.4 * math.sin(step / 40) + noise.gauss(0, 0.15),
            grad_norm=noise.lognormvariate(0, 0.5),
        )
        for step in range(3000)
    ]


Shape = Callable[[random.Random], list[StepRecord]]

STEADY: dict[str, Shape] = {
    "every-step": language_model,
    "every-5": lambda noise: language_model(noise, 5),
    "every-10": lambda noise: language_model(noise, 10),
    "every-100": lambda noise: language_model(noise, 100),
    "bits": lambda noise: language_model(noise, unit=1 / math.log(2)),
    "restarts": restarts,
    "fine-tuning": fine_tuning,
    "rewards": rewards,
}
ROUGH: dict[str, Shape] = {
    "small-batches": small_batches,
    "small-data": small_data,
    "adversaries": adversaries,
}


def made(shape: str, seed: int) -> list[Any]:
    return {**STEADY, **ROUGH}[shape](random.Random(seed))
