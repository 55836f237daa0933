"""A step run twice: the same bits, or what differs first; and afterwards all is as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip.monitor import Monitor, Recovery
from tests.monitor.recovery.making import Run, Tally

BITS = "the same bits both times, on every rank: what went wrong comes from the data or the model"


def everything(run: Run) -> Any:
    states = {name: each.state_dict() for name, each in run.state().items() if name != "monitor"}
    grads = [None if p.grad is None else p.grad.tolist() for p in run.model.parameters()]
    return str(states), grads, torch.get_rng_state().tolist(), run.recovery.lr_scale


def test_the_same_bits(tmp_path: Path) -> None:
    """In the middle of a step, as somebody would who has just seen an alarm."""
    run = Run(tmp_path)
    for step, batch in run.recovery.steps(20):
        loss = run.body(step, batch)
        if step == 13:
            for each in run.model.parameters():
                each.grad = torch.ones_like(each)
            before = everything(run)
            ran: list[tuple[int, int]] = []

            def body(step: int, batch: int, ran: list[tuple[int, int]] = ran) -> Tensor:
                ran.append((step, batch))
                return run.body(step, batch)

            found = run.recovery.replay(13, body)
            assert ran == [(step, step) for step in (10, 11, 12, 13)] * 2
            assert found.same
            assert tuple(found) == (10, 13, (10, 11, 12, 13), loss.item(), None, None, None)
            assert everything(run) == before
            for each in run.model.parameters():
                each.grad = None
        run.recovery.handle([])
    assert run.bits() == Run(tmp_path / "whole").advance(20).bits()
    assert str(found).startswith("Steps 10 to 13 were run twice, from the checkpoint of step 10")
    assert "with the batches 10 to 13.\n" in str(found)
    assert BITS in str(found)


def test_what_differs_first_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path).advance(12)
    calls: list[int] = []

    def body(step: int, batch: int) -> Tensor:
        loss = run.body(step, batch)
        calls.append(step)
        if len(calls) == 5:  # step 11 of the second time
            with torch.no_grad():
                run.model.get_parameter("3.weight")[0, 1] += 1e-3
        return loss

    before = everything(run)
    found = run.recovery.replay(12, body)
    assert calls == [12, 12]
    assert found.same  # from the checkpoint of step 12 itself
    calls.clear()
    found = run.recovery.replay(11, body)
    assert calls == [10, 11, 10, 11]
    assert found.same
    calls[:] = [0]
    found = run.recovery.replay(11, body)
    assert found[4:] == (11, 0, "model/3.weight")
    assert "At step 11, model/3.weight on rank 0 was the first to differ" in str(found)
    assert everything(run) == before


def test_a_loss_that_differs(tmp_path: Path) -> None:
    run = Run(tmp_path).advance(7)
    noise = iter([1.0, 2.0, 1.0, 2.5])
    found = run.recovery.replay(6, lambda step, batch: next(noise))
    assert found[:4] == (5, 6, (5, 6), 2.5)
    assert found[4:] == (6, 0, "the loss")
    found = run.recovery.replay(6, lambda step, batch: None)
    assert (found.loss, found.same) == (None, True)
    assert str(found).endswith(
        "Parameters and buffers were the same bits both times, on every rank. The loss was not "
        "compared: run returned None."
    )
    with pytest.raises(TypeError, match="run must return the loss, a number, or None, got 'x'"):
        run.recovery.replay(6, lambda step, batch: "x")


@pytest.mark.parametrize("background", [False, True], ids=["at-once", "background"])
def test_a_step_that_cannot_have_been_run(tmp_path: Path, background: bool) -> None:
    """A new process knows of the steps past the newest checkpoint only that the next is missing."""
    state: dict[str, Any] = {"tally": Tally()}
    options: dict[str, Any] = {"every": 5, "asynchronous": background}
    list(Recovery(tmp_path, state, **options).steps(7))
    again = Recovery(tmp_path, state, **options)
    last = 16 if background else 11  # the newest is that of step 7
    assert again.replay(last, lambda step, batch: 0.0).step == last
    with pytest.raises(ValueError, match=f"step must be at most {last}, .*, got {last + 1}$"):
        again.replay(last + 1, lambda step, batch: 0.0)


def test_an_abandoned_attempt(tmp_path: Path) -> None:
    """Before the rollback is carried out, and long after it, with the batches of then."""
    run = Run(tmp_path, poisoned={14})
    found = []
    for step, batch in run.recovery.steps(25):
        loss = run.body(step, batch)
        events = run.monitor.observe(step=step, loss=loss, stats=run.stats)
        if run.recovery.handle(events):
            found.append(run.recovery.replay(step, run.body))
    later = run.recovery.replay(14, run.body, rollbacks=0)
    for each in (found[0], later):
        assert (each.step, each.batches[-1], each.same) == (14, 14, True)
        assert each.loss != each.loss
    after = run.recovery.replay(16, run.body)
    assert after.batches == (17, 18)
    assert after.loss == after.loss


def test_no_monitor_hears_of_it(tmp_path: Path) -> None:
    monitor, tally = Monitor([]), Tally()
    each = Recovery(tmp_path, {"monitor": monitor, "tally": tally}, every=2)
    for step, batch in each.steps(5):
        tally.batches.append(batch)
        monitor.observe(step=step, loss=1.0)
    before = monitor.state_dict()
    each.replay(3, lambda step, batch: tally.batches.append(batch))
    assert monitor.state_dict() == before
    assert tally.batches == [0, 1, 2, 3, 4]


def test_wrong_arguments(tmp_path: Path) -> None:
    each = Recovery(tmp_path, {"tally": Tally()})
    with pytest.raises(ValueError, match="step must be a whole number of at least 0, got -1"):
        each.replay(-1, lambda step, batch: None)
    with pytest.raises(ValueError, match="rollbacks must be 0 to 0, got 1"):
        each.replay(1, lambda step, batch: None, rollbacks=1)
    with pytest.raises(RuntimeError, match="no intact checkpoint of a step of at most 1"):
        each.replay(1, lambda step, batch: None)
