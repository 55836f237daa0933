"""From the alarm to a healthy run, with the whole chain: clipper, monitor, recovery, log."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import GradClipper
from fastclip.monitor import (
    JSONL,
    Event,
    Monitor,
    Recovery,
    RollbackPolicy,
    Skips,
    StepRecord,
    Telemetry,
    default_detectors,
)
from fastclip.monitor.detectors import Sustained
from tests.monitor.recovery.making import Tally

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


class At:
    """A detector that knows which batches are poisoned, and when it began."""

    kind, metric = "at", "loss"

    def __init__(self, poisoned: dict[int, int]) -> None:
        self.poisoned = poisoned  # batch: onset

    def init(self) -> None: ...

    def __call__(self, state: None, record: StepRecord) -> tuple[None, list[Event]]:
        if (onset := self.poisoned.get(record.batch or 0)) is None:
            return None, []
        event = Event(record.step, "at", "critical", "loss", 1.0, onset=onset, message="poisoned")
        return None, [event]


@pytest.mark.parametrize("lag", [0, 2, 5])
def test_how_late_a_record_comes_changes_no_decision(tmp_path: Path, lag: int) -> None:
    """The checkpoint of step 10 is good once the steps 10 to 14 were judged, and 14 is at fault."""
    monitor, tally = Monitor([At({14: 12})], telemetry=Telemetry(lag)), Tally()
    policy = RollbackPolicy(confirm=5)
    each = Recovery(tmp_path, {"monitor": monitor, "tally": tally}, policy, every=10)
    good: dict[int, int] = {}  # the first step at which each was confirmed
    for step, batch in each.steps(40):
        tally.batches.append(batch)
        for checkpoint in each.checkpoints:
            if checkpoint.confirmed:
                good.setdefault(checkpoint.step, step)
        each.handle(monitor.observe(step=step, loss=1.0, batch=batch))
    assert each.rollbacks == [(14, 12, 0, (11, 12, 13, 14))]
    assert tally.batches[:12] == [*range(11), 15]
    assert good[10] == 15 + lag


def test_events_of_an_attempt_that_was_given_up(tmp_path: Path) -> None:
    """The record of step 3 is on its way when the loop's body raises, and when it is rolled back:
    what is found in it later is not held against the step 3 that comes then."""
    monitor, tally = Monitor([At({3: 3})], telemetry=Telemetry(1)), Tally()
    policy = RollbackPolicy(confirm=0, before=0)
    each = Recovery(tmp_path, {"monitor": monitor, "tally": tally}, policy, every=1)

    def train() -> None:
        for step, batch in each.steps(8):
            tally.batches.append(batch)
            each.handle(monitor.observe(step=step, loss=1.0, batch=batch))
            if (step, batch) == (3, 3) and not raised:
                raised.append(step)
                raise ZeroDivisionError

    raised: list[int] = []
    with pytest.raises(ZeroDivisionError):
        train()
    train()
    assert each.rollbacks == [(3, 3, 3, (3,))]
    assert tally.batches == [0, 1, 2, *range(4, 9)]


@pytest.mark.parametrize("watched", [False, True], ids=["defaults", "with Skips"])
def test_a_run_that_only_skips(tmp_path: Path, watched: bool) -> None:
    """Every batch from 30 on is NaN. The clipper skips; the defaults only warn, Skips goes back."""
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clipper = GradClipper(model, max_norm=1.0)
    monitor = Monitor([*default_detectors(), *([Skips()] if watched else [])])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "clipper": clipper}
    policy = RollbackPolicy(confirm=5, max_rollbacks=1)
    each = Recovery(tmp_path, {**state, "monitor": monitor}, policy, every=10)
    levels: dict[int, set[str]] = {}
    finite: dict[int, list[bool]] = {}  # whether the buffers were, each time before the step

    def train() -> None:
        for step, batch in each.steps(60):
            buffer = model.get_buffer("1.running_mean")
            finite.setdefault(step, []).append(bool(buffer.isfinite().all()))
            inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(batch))
            loss = model(inputs / 0 if batch >= 30 else inputs).square().mean()
            loss.backward()
            stats = clipper.step(optimizer)
            optimizer.zero_grad()
            found = monitor.observe(step=step, loss=loss, stats=stats, batch=batch)
            levels.setdefault(step, {event.level for event in found})
            if each.handle(found):
                first.append(step)

    first: list[int] = []
    if not watched:
        train()
        assert each.rollbacks == []
        assert {step for step, found in levels.items() if found} == set(range(30, 60))
        assert set.union(*levels.values()) == {"warn"}
        assert finite[31] == [False]
        return
    with pytest.raises(RuntimeError, match=r"all are used: 1 of at most 1 \(skips: the last 10"):
        train()
    assert first == [39]
    assert each.rollbacks == [(39, 30, 20, tuple(range(29, 40)))]
    assert (finite[20], finite[38]) == ([True, True], [False, False])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
