"""The cut is in force while the optimizer steps, and nobody else ever sees it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.monitor import Recovery, RollbackPolicy
from fastclip.monitor.recovery.learning_rate import Cut
from tests.monitor.recovery.making import Run, Tally, event


def one(rate: Any = 0.4) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return weight, torch.optim.SGD([weight], lr=rate)


@pytest.mark.parametrize("factor", [0.5, 0.3, 0.0, 1.0])
def test_around_the_step_only(factor: float) -> None:
    weight, optimizer = one(0.1)
    cut = Cut([optimizer], lambda: factor)
    cut.attach()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert weight.item() == pytest.approx(-0.1 * factor)
    cut.detach()
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1 * factor - 0.1)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """Also where groups share it; it comes back to the bit."""
    rate = torch.tensor(0.1)
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [w]} for w in weights], lr=rate, foreach=False)
    seen: list[Tensor] = []
    cut = Cut([optimizer], lambda: 0.3)
    cut.attach()
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"].clone()))
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert torch.equal(rate, torch.tensor(0.1))
    assert seen[0].item() == pytest.approx(0.03)
    assert [weight.item() for weight in weights] == pytest.approx([-0.03, -0.03])


def test_several_groups_and_optimizers() -> None:
    pairs = [one(rate) for rate in (0.1, 1.0)]
    groups = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    second: dict[str, Any] = {"params": [groups[1]], "lr": torch.tensor(2.0)}
    both = torch.optim.SGD([{"params": [groups[0]]}, second], lr=1.0)
    cut = Cut([optimizer for _, optimizer in pairs] + [both], lambda: 0.5)
    cut.attach()
    for weight in groups:
        weight.grad = torch.ones(1)
    for optimizer in (pairs[0][1], pairs[1][1], both):
        optimizer.step()
    values = [weight.item() for weight in (pairs[0][0], pairs[1][0], *groups)]
    assert values == pytest.approx([-0.05, -0.5, -0.5, -1.0])
    assert [group["lr"] for group in both.param_groups] == [1.0, 2.0]


def test_a_step_that_raises() -> None:
    """The rate is back at the next step, and when somebody asks."""
    weight, optimizer = one(0.1)
    cut = Cut([optimizer], lambda: 0.5)
    cut.attach()

    def fail() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert weight.item() == pytest.approx(-0.05)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    cut.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_as_long_as_the_policy_says_and_the_schedule_is_untouched(tmp_path: Path) -> None:
    """Steps 10 to 15 are cut; the rates between steps are those of a run without a rollback."""
    run = Run(tmp_path / "a", RollbackPolicy(confirm=4, lr_steps=6, lr_scale=0.1), poisoned={14})
    scales = {}
    moved = {}
    weight = next(run.model.parameters())
    for step, batch in run.recovery.steps(22):
        before = weight.detach().clone()
        rate = run.optimizer.param_groups[0]["lr"]
        loss = run.body(step, batch)
        scales[step] = run.recovery.lr_scale
        # Adam moves every weight by about its rate.
        moved[step] = ((weight.detach() - before).abs().mean() / rate).item()
        run.rates.append(run.optimizer.param_groups[0]["lr"])
        run.recovery.handle(run.monitor.observe(step=step, loss=loss, stats=run.stats))
    assert scales == {step: 0.1 if 10 <= step < 16 else 1.0 for step in range(22)}
    assert max(moved[step] for step in range(10, 16)) < 0.2
    assert min(moved[step] for step in (*range(10), *range(16, 22))) > 0.2
    plain = Run(tmp_path / "b").advance(22)
    assert run.rates[15:] == plain.rates[10:]


def test_a_second_rollback_starts_it_again_and_does_not_compound(tmp_path: Path) -> None:
    policy = RollbackPolicy(confirm=2, lr_steps=6, lr_scale=0.5)
    recovery = Recovery(tmp_path, {"tally": Tally()}, policy, every=5)
    scales = {}
    for step, batch in recovery.steps(30):
        scales[step] = recovery.lr_scale
        recovery.handle([event(step)] if batch in (8, 13) else [])
        assert recovery.lr_scale == scales[step]  # it is of this step until the next one
    assert [rollback.target for rollback in recovery.rollbacks] == [5, 5]
    assert scales == {step: 0.5 if 5 <= step < 11 else 1.0 for step in range(30)}


def test_hooks_go_with_the_loop(tmp_path: Path) -> None:
    """Another Recovery of the same optimizer, later, cuts once."""
    weight, optimizer = one(1.0)
    for name, expected in (("a", -0.5), ("b", -1.0)):
        recovery = Recovery(tmp_path / name, {"optimizer": optimizer}, RollbackPolicy(confirm=0))
        for step, batch in recovery.steps(2):
            if batch == 0:
                recovery.handle([event(0)])
                continue
            weight.grad = torch.ones(1)
            optimizer.step()
            if step == 0:
                assert weight.item() == expected
                break
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -2.0
