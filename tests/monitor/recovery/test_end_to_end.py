"""From the alarm to a healthy run, with the whole chain: clipper, monitor, recovery, log."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import GradClipper
from fastclip.monitor import JSONL, Monitor, Recovery, RollbackPolicy
from fastclip.monitor.detectors import Sustained

STEPS = 400
TARGET = 3.0


def train(folder: Path, poisoned: range) -> tuple[float, Recovery, list[float]]:
    """One weight that is to become 3; the poisoned batches say -500 instead."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    clipper = GradClipper([weight], max_norm=10.0)
    monitor = Monitor([Sustained()], [JSONL(folder / "run.jsonl")])
    state: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "clipper": clipper}
    recovery = Recovery(
        folder / "checkpoints",
        {"weight": nn.ParameterList([weight]), **state, "monitor": monitor},
        RollbackPolicy(lr_steps=50),
        every=50,
    )
    losses: dict[int, float] = {}
    for step, batch in recovery.steps(STEPS):
        noise = torch.randn(256, generator=torch.Generator().manual_seed(batch))
        goal = -500.0 if batch in poisoned else TARGET
        loss = (weight - goal - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        stats = clipper.step(optimizer)
        scheduler.step()
        losses[step] = loss.item()
        found = monitor.observe(step=step, loss=loss, stats=stats, batch=batch)
        recovery.handle(found)
    return weight.item(), recovery, list(losses.values())


def test_poisoned_batches_are_found_and_left_out(tmp_path: Path) -> None:
    poisoned = range(250, 254)
    weight, recovery, losses = train(tmp_path / "poisoned", poisoned)
    clean, untouched, expected = train(tmp_path / "clean", range(0))
    assert untouched.rollbacks == []
    assert recovery.rollbacks == [(254, 250, 150, (249, 250, 251, 252, 253, 254))]
    assert weight == pytest.approx(clean, abs=0.05)
    assert sum(losses[-50:]) == pytest.approx(sum(expected[-50:]), rel=0.02)
    records = list(JSONL(tmp_path / "poisoned" / "run.jsonl"))
    again = [record for record in records if record.attempt == 1]
    assert [record.step for record in again] == list(range(150, STEPS))
    assert not {record.batch for record in again} & {249, *poisoned, 254}


def test_one_pass_over_the_log_finds_the_same(tmp_path: Path) -> None:
    train(tmp_path, range(250, 254))
    events = Monitor([Sustained()]).replay(tmp_path / "run.jsonl")
    assert events[0].onset == 250
