"""A resumed or rolled back run has all that the run had."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastclip import GradClipper, rules
from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy
from tests.monitor.recovery.making import Run, Tally, event

POLICY = RollbackPolicy(confirm=4, lr_steps=6)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stopped", [1, 5, 13, 17, 24])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, stopped: int, asynchronous: bool
) -> None:
    """With a rollback at step 14, whose cut a run that stopped at 17 has to go on with."""
    whole = Run(tmp_path / "whole", poisoned={14}).advance(25)
    assert whole.recovery.rollbacks == [(14, 14, 10, (13, 14))]
    Run(tmp_path / "parts", poisoned={14}, asynchronous=asynchronous).advance(stopped)
    again = Run(tmp_path / "parts", poisoned={14}, asynchronous=asynchronous).advance(25)
    assert again.used == whole.used[-len(again.used) :]
    assert again.bits() == whole.bits()
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    assert again.clipper.counters() == whole.clipper.counters()


def test_a_rollback_in_the_process_is_that_of_a_new_one(tmp_path: Path) -> None:
    """What the body does after `handle`, and what it leaves in the gradients, is undone."""
    plain = Run(tmp_path / "plain", poisoned={14}).advance(25)
    spoilt = Run(tmp_path / "spoilt", poisoned={14})
    for step, batch in spoilt.recovery.steps(25):
        loss = spoilt.body(step, batch)
        found = spoilt.monitor.observe(step=step, loss=loss, stats=spoilt.stats)
        if spoilt.recovery.handle(found):
            torch.rand(3)
            random.random()
            for each in spoilt.model.parameters():
                each.grad = torch.full_like(each, 3.0)
    assert spoilt.recovery.rollbacks == plain.recovery.rollbacks != []
    assert spoilt.bits() == plain.bits()


def drawn() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), *np.random.rand(2)]


def test_random_numbers(tmp_path: Path) -> None:
    each = Recovery(tmp_path, {"tally": Tally()}, every=4)
    numbers: dict[int, Any] = {}
    for step, _ in each.steps(8):
        random.gauss(0, 1)  # leaves one for the next call
        numbers[step] = drawn()
    assert Recovery(tmp_path, {"tally": Tally()}).restore(before=4) == 4
    for step in range(4, 8):
        random.gauss(0, 1)
        assert drawn() == numbers[step]


RULES: dict[str, Callable[[], rules.Rule]] = {
    "adagc": lambda: rules.AdaGC(warmup=3),
    "zclip": lambda: rules.ZClip(warmup=3),
    "logz": lambda: rules.LogZ(warmup=3),
    "autoclip": lambda: rules.AutoClip(window=10),
}


@pytest.mark.parametrize("name", RULES)
def test_the_state_of_a_rule(tmp_path: Path, name: str) -> None:
    """A new clipper has none yet; the checkpoint's comes whole, whatever its structure."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    clipper = GradClipper(model, rule=RULES[name]())
    for step, _ in Recovery(tmp_path, {"clipper": clipper}).steps(8):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        clipper.clip_()
    new = GradClipper(model, rule=RULES[name]())
    assert Recovery(tmp_path, {"clipper": new}).restore() == 8
    saved, loaded = clipper.state_dict(), new.state_dict()
    assert saved.keys() == loaded.keys()
    assert str(saved) == str(loaded)
    for each in (clipper, new):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 50.0)
        each.clip_()
    assert str(clipper.state_dict()) == str(new.state_dict()) != str(saved)


def test_tied_weights_and_frozen_ones(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Embedding(4, 2))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build()
    for _ in Recovery(tmp_path, {"model": model, "optimizer": optimizer}).steps(3):
        model[:2](torch.ones(3)).sum().backward()
        optimizer.step()
    new, moments = build()
    Recovery(tmp_path, {"model": new, "optimizer": moments}).restore()
    assert new[0].weight is new[1].weight
    for name, value in model.state_dict().items():
        assert torch.equal(new.state_dict()[name], value)
    assert str(moments.state_dict()) == str(optimizer.state_dict())


def test_a_scaler_and_a_sampler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    tally = Tally()
    for _, batch in Recovery(tmp_path, {"scaler": scaler, "sampler": tally}).steps(4):
        tally.batches.append(batch)
        scaler.scale(torch.ones(1))
        scaler.update(float(2**batch))
    new, sampler = torch.amp.GradScaler("cpu"), Tally()
    Recovery(tmp_path, {"scaler": new, "sampler": sampler}).restore()
    assert new.get_scale() == 8.0
    assert sampler.batches == [0, 1, 2, 3]


def test_parts_that_are_missing_or_new(tmp_path: Path) -> None:
    one, two = Tally(), Tally()
    for _ in Recovery(tmp_path, {"one": one, "two": two}).steps(1):
        one.batches.append(5)
    three = Tally()
    each = Recovery(tmp_path, {"one": three, "new": Tally()})
    with pytest.raises(ValueError, match="the checkpoint has no state of 'new'"):
        each.restore()
    assert three.batches == []
    with pytest.warns(UserWarning, match="a state of 'two', which this run does not have"):
        Recovery(tmp_path, {"one": three}).restore()
    assert three.batches == [5]


def test_a_state_that_was_loaded_in_part_is_not_saved(tmp_path: Path) -> None:
    class Refusing(Tally):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError

    one = Tally()
    each = Recovery(tmp_path, {"one": one, "two": Refusing()}, every=2)
    steps = each.steps(5)
    for _ in range(3):
        one.batches.append(next(steps)[1])
    with pytest.raises(RuntimeError, match=r"state\['two'\] cannot load: ZeroDivisionError: "):
        each.restore()
    assert one.batches == [0, 1]
    with pytest.raises(RuntimeError, match=r"call steps\(\) or restore\(\) before save"):
        each.save()
    with pytest.raises(RuntimeError, match=r"restore\(\) failed, and this loop cannot go on"):
        next(steps)


def test_an_asynchronous_save_is_of_its_moment(tmp_path: Path) -> None:
    """Training goes on, in place, while the checkpoint is being written."""
    model = nn.Linear(700, 700)
    each = Recovery(tmp_path, {"model": model}, every=1, keep=9, asynchronous=True)
    for step, _ in each.steps(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step + 1)
    for checkpoint in each.checkpoints:
        assert each.restore(before=checkpoint.step) == checkpoint.step
        if checkpoint.step:
            assert all((p == checkpoint.step).all() for p in model.parameters())
    assert len(each.checkpoints) == 6


def test_events_of_a_flush_come_before_the_checkpoint(tmp_path: Path) -> None:
    """What a Monitor still has on its way is handled at the end of the run, too."""

    class Late(Monitor):
        pending: Sequence[Event] = ()

        def flush(self) -> list[Event]:
            given, self.pending = list(self.pending), ()
            return given

    run = Run(tmp_path / "run")
    run.monitor = late = Late([])
    recovery = Recovery(tmp_path / "run", run.state(), POLICY, every=5)
    fired = 0
    seen = []
    for step, batch in recovery.steps(10):
        seen.append(step)
        run.body(step, batch)
        if step in (4, 9) and fired < 2 and batch == (4, 11)[fired]:
            late.pending = [event(step)]
            fired += 1
    assert [rollback[:3] for rollback in recovery.rollbacks] == [(4, 4, 0), (9, 9, 5)]
    assert seen == [*range(5), *range(10), *range(5, 10)]
