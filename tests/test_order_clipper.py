"""A guard and GradClipper: right loops are silent, mistakes are found."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import fastclip
from tests.order_loops import warned

MAKERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], Optimizer]] = {
    "unfused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: AdamW(parameters, fused=True),
}


@pytest.fixture(params=MAKERS)
def optimizer(request: pytest.FixtureRequest) -> Optimizer:
    made: Optimizer = MAKERS[request.param](torch.nn.Linear(4, 3).parameters())
    return made


def backward(optimizer: Optimizer, scaler: GradScaler | None = None, times: float = 1.0) -> None:
    loss = sum((p * p).sum() for group in optimizer.param_groups for p in group["params"])
    assert isinstance(loss, torch.Tensor)
    (loss * times if scaler is None else scaler.scale(loss * times)).backward()


def clipper_of(optimizer: Optimizer) -> fastclip.GradClipper:
    return fastclip.GradClipper(optimizer.param_groups[0]["params"], 0.1)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_steps_in_the_right_order_are_silent(optimizer: Optimizer, scaled: bool) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0) if scaled else None
    clipper = clipper_of(optimizer)
    with fastclip.order_guard(optimizer, scaler):
        for number in range(6):
            optimizer.zero_grad()
            backward(optimizer, scaler)
            backward(optimizer, scaler, float("inf") if number == 3 else 1.0)
            clipper.step(optimizer, scaler)
            if scaler is not None:
                scaler.update()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_clip_then_step_is_silent(optimizer: Optimizer, scaled: bool) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0) if scaled else None
    clipper = clipper_of(optimizer)
    with fastclip.order_guard(optimizer, scaler):
        for _ in range(4):
            optimizer.zero_grad()
            backward(optimizer, scaler)
            clipper.measure()
            clipper.clip_(optimizer, scaler)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()


def test_a_clip_of_scaled_gradients_is_noticed(optimizer: Optimizer) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    clipper = clipper_of(optimizer)
    with fastclip.order_guard(optimizer, scaler):
        backward(optimizer, scaler)
        (warning,) = warned(clipper.clip_)
    assert "1024" in str(warning.message)


def test_a_clip_after_the_step_is_noticed(optimizer: Optimizer) -> None:
    clipper = clipper_of(optimizer)
    with fastclip.order_guard(optimizer):
        backward(optimizer)
        optimizer.step()
        (warning,) = warned(clipper.clip_)
    assert "stepped with already" in str(warning.message)


def test_a_clip_of_every_micro_batch_is_noticed(optimizer: Optimizer) -> None:
    clipper = clipper_of(optimizer)
    with fastclip.order_guard(optimizer):
        backward(optimizer)
        clipper.clip_()
        backward(optimizer)
        (warning,) = warned(clipper.clip_)
    assert "micro-batch" in str(warning.message)
