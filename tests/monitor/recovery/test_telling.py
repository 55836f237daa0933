"""What is said of a rollback, and what a wrong argument or a state that does not fit is told."""

import inspect
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy
from fastclip.monitor.recovery.ledger import Decision
from fastclip.monitor.recovery.telling import log_rollback
from tests.monitor.recovery.making import Run, Tally, event, recovery, tallied

PART = Event(7, "nonfinite", "critical", "loss", 1.0, onset=6, onset_metric="grad_norm")


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what the logger "fastclip" was given."""
    return [(each.levelname, each.message) for each in caplog.records if each.name == "fastclip"]


def test_a_rollback_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run = Run(tmp_path, poisoned={14}).advance(25)
    assert run.recovery.rollbacks == [(14, 14, 10, (13, 14))]
    assert messages(caplog) == [
        (
            "WARNING",
            "rolling back from the alarm at step 14 (nonfinite; onset 14, loss) to the checkpoint "
            "of step 10, without the batches 13 to 14, with the learning rate multiplied by 0.5 "
            "until step 16: rollback 1 of at most 3",
        )
    ]


RANKS: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "all": (((6, 7), (6, 7), (6, 7)), "without the batches 6 to 7 of rank 0 to 2,"),
    "one": (((), (6, 7), ()), "without the batches 6 to 7 of rank 1,"),
    "different": (((6, 9), (6, 7), (6, 9)), "without the batches 6, 9 of rank 0, 2, 6 to 7 of"),
    "none": (((), ()), "without the batches of no rank,"),
}


@pytest.mark.parametrize("case", RANKS)
def test_batches_of_several_ranks(case: str, caplog: pytest.LogCaptureFixture) -> None:
    skipped, said = RANKS[case]
    events = [event(8, 7), PART, PART]
    policy = RollbackPolicy(lr_steps=0)
    log_rollback(Decision(8, 6, 3, 3, skipped), events, policy, 2)
    (_, text), *more = messages(caplog)
    assert more == []
    assert text.startswith("rolling back from the alarm at step 8 (made, nonfinite; onset 6, grad")
    assert said in text
    assert text.endswith("with the learning rate as scheduled: rollback 2 of at most 3")


def test_the_end_of_the_budget_says_what_to_do(tmp_path: Path) -> None:
    each = recovery(tmp_path, Tally(), RollbackPolicy(max_rollbacks=0))
    next(iter(each.steps(5)))
    said = (
        r"step 0, onset 0, .* 0 of at most 0 .*the learning rate, the model, the machine, or a "
        r"detector too sensitive for this loss \(docs/monitoring\.md, Detectors\)"
    )
    with pytest.raises(RuntimeError, match=said):
        each.handle([event(0)])


@pytest.mark.parametrize("given", [None, event(0), [3], "no", [event(0), None]], ids=repr)
def test_events_that_are_no_list(tmp_path: Path, given: Any) -> None:
    """Nothing is changed by it: the step may be handled after all."""
    tally = Tally()
    each = recovery(tmp_path, tally)
    for _ in each.steps(1):
        with pytest.raises(TypeError, match=r"events must be those that Monitor\.observe returns"):
            each.handle(given)
        assert each.handle([]) is False


def test_a_state_that_is_no_dict(tmp_path: Path) -> None:
    parts: Any = [nn.Linear(1, 1)]
    with pytest.raises(TypeError, match=r"state must be a dict of parts by name, .*got \[Linear"):
        Recovery(tmp_path / "run", parts)
    assert list(tmp_path.iterdir()) == []


def test_another_model(tmp_path: Path) -> None:
    """The error is the original one, and says which part it was."""
    good: dict[str, Any] = {"monitor": Monitor([]), "net": nn.Linear(2, 2)}
    list(Recovery(tmp_path, good).steps(1))
    other: dict[str, Any] = {"monitor": Monitor([]), "net": nn.Sequential(nn.Linear(2, 2))}
    said = r"has a state of 'net' that state\['net'\] cannot load: .*Missing key\(s\).*0\.weight"
    with pytest.raises(RuntimeError, match=re.compile(said, re.DOTALL)) as caught:
        Recovery(tmp_path, other).restore()
    assert "Missing key(s)" in str(caught.value.__cause__)


def damaged(folder: Path) -> Recovery:
    """Checkpoints of the steps 0, 10 and 20, where that of step 20 has lost a file."""
    list(tallied(recovery(folder, Tally()), Tally(), 20))
    (folder / "step-000000020" / "manifest.json").unlink()
    return recovery(folder, Tally())


def test_a_damaged_checkpoint_is_told_at_the_line_of_the_user(tmp_path: Path) -> None:
    for name in ("restore", "steps"):
        each = damaged(tmp_path / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            each.restore() if name == "restore" else next(iter(each.steps(40)))
        assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


def test_a_part_too_many_is_told_at_the_line_of_the_user(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"tally": Tally(), "more": Tally()}
    list(Recovery(tmp_path, parts).steps(1))
    each = recovery(tmp_path, Tally())
    with pytest.warns(UserWarning, match="has a state of 'more'") as caught:
        each.restore()
    assert [each.filename for each in caught] == [__file__]


def test_the_rate_that_was_used(tmp_path: Path) -> None:
    """The scheduler's, times `lr_scale`."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    state: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
    each = Recovery(tmp_path, state, RollbackPolicy(confirm=0, lr_steps=3), every=4)
    used: list[tuple[int, float, float]] = []
    for step, batch in each.steps(9):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        lr = float(scheduler.get_last_lr()[0]) * each.lr_scale
        used.append((step, lr, before - weight.item()))
        scheduler.step()
        each.handle([event(step)] if batch == 5 else [])
    assert each.rollbacks == [(5, 5, 4, (4, 5))]
    rates = [0.5] * 6 + [0.25] * 3 + [0.05] * 2
    assert [step for step, _, _ in used] == [*range(6), *range(4, 9)]
    assert [lr for _, lr, _ in used] == pytest.approx(rates)
    assert [change for _, _, change in used] == pytest.approx(rates, rel=1e-4)
