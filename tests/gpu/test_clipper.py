"""GradClipper on a GPU: no wait for it in a fused step, and the same results as torch's way."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from fastclip import GradClipper
from tests import training
from tests.training import FUSED, ONE_COEFFICIENT, PER_TENSOR

Forbidden = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: no GPU here"
)

STEPS = 12
BAD = {4: math.nan, 8: math.inf}
POLICIES = ["skip", "propagate"]


def on_gpu(steps: int, bad: dict[int, float] | None = None) -> list[dict[str, Any]]:
    made = training.stream(steps, bad=bad)
    return [{name: grad.cuda() for name, grad in grads.items()} for grads in made]


def parameters() -> training.Parameters:
    values = training.parameters()
    return {name: torch.nn.Parameter(p.detach().cuda()) for name, p in values.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ONE_COEFFICIENT)
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_step_does_not_wait(
    optimizer: str, rule: str, policy: str, waiting_raises: Forbidden
) -> None:
    params = parameters()
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params, rule, nonfinite=policy)
    skipped = []
    for step, grads in enumerate(on_gpu(STEPS, BAD)):
        training.assign(params, grads)
        if step == 0:  # what is allocated, compiled and listed once
            clipper.step(made)
            continue
        with waiting_raises():
            skipped.append(clipper.step(made).skipped)
    assert [bool(x) for x in skipped] == [policy == "skip" and s in BAD for s in range(1, STEPS)]
    assert {counter.device.type for counter in clipper.counters().values()} == {"cuda"}


@pytest.mark.parametrize("rule", ["MaxNorm", "LogZ"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_step_with_a_scaler_does_not_wait(
    optimizer: str, rule: str, waiting_raises: Forbidden
) -> None:
    params, scaler = parameters(), GradScaler("cuda", init_scale=2.0**13, growth_interval=100)
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params, rule)
    for step, grads in enumerate(on_gpu(STEPS, BAD)):
        training.backward(params, grads, scaler)
        if step == 0:
            clipper.step(made, scaler)
            scaler.update()
            continue
        with waiting_raises():
            clipper.step(made, scaler)
            scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert training.counted(clipper)[2] == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", [*ONE_COEFFICIENT, *PER_TENSOR])
def test_clip_and_measure_do_not_wait(rule: str, policy: str, waiting_raises: Forbidden) -> None:
    params = parameters()
    clipper = training.clipper(params, rule, nonfinite=policy)
    for step, grads in enumerate(on_gpu(STEPS, BAD)):
        training.assign(params, grads)
        if step == 0:
            clipper.measure()
            clipper.clip_()
            continue
        with waiting_raises():
            clipper.measure()
            clipper.clip_()


def test_the_unfused_step_waits_for_the_flag(waiting_raises: Forbidden) -> None:
    """Which also shows that a wait is seen."""
    params = parameters()
    made = training.optimizer("momentum-foreach", params)
    clipper = training.clipper(params)
    for grads in on_gpu(2):
        training.assign(params, grads)
        clipper.step(made)
    with waiting_raises(), pytest.raises(RuntimeError, match="synchroniz"):
        clipper.step(made)


@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
def test_agrees_with_torch(optimizer: str) -> None:
    ours, theirs = parameters(), parameters()
    made = [training.optimizer(optimizer, side) for side in (ours, theirs)]
    clipper = GradClipper(ours.items(), 5.0)
    for step, grads in enumerate(on_gpu(60, {7: math.nan, 30: math.inf})):
        training.assign(ours, grads)
        stats = clipper.step(made[0])
        if step in (7, 30):
            assert stats.skipped
            continue
        training.assign(theirs, grads)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 5.0)
        made[1].step()
    training.near(ours, theirs, 1e-6)
    training.near(training.moments(made[0]), training.moments(made[1]), 1e-6)


@pytest.mark.parametrize("rule", training.RULES)
def test_state_moves_to_the_gpu_when_it_is_loaded(rule: str) -> None:
    """Saved from there, loaded on the host, and used there again: bitwise the same decisions."""
    whole, again = parameters(), parameters()
    clipper, other = training.clipper(whole, rule), training.clipper(again, rule)
    grads = on_gpu(24, BAD)
    for one in grads[:12]:
        training.assign(whole, one)
        clipper.clip_()
    saved = training.snapshot(clipper.state_dict())
    other.load_state_dict(_on_host(saved))
    for one in grads[12:]:
        decided = []
        for params, made in ((whole, clipper), (again, other)):
            training.assign(params, one)
            stats = made.clip_()
            assert stats.coef.device.type == "cuda"
            decided.append([stats.coef, stats.threshold])
        training.same(decided[0], decided[1])
    training.same(clipper.state_dict(), other.state_dict())


def _on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: _on_host(value) for key, value in tree.items()}
    return [_on_host(value) for value in tree] if isinstance(tree, list) else tree
