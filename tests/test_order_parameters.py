"""The order guard finds mistakes in any part of what its optimizers have."""

import functools

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import fastclip
from tests.order_loops import Training, line_of, warned


@pytest.mark.parametrize("wrong", [0, 1])
def test_several_optimizers(wrong: int) -> None:
    pair = Training(), Training()

    def loop() -> None:
        for t in pair:
            t.backward()
            if t is pair[wrong]:
                t.optimizer.step()
                t.clip(t.params, 1.0)  # wrong
            else:
                t.clip(t.params, 1.0)
                t.optimizer.step()

    with fastclip.order_guard(t.optimizer for t in pair):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)


def test_both_networks_clipped_after_both_steps() -> None:
    pair = Training(), Training()

    def loop() -> None:
        for t in pair:
            t.backward()
            t.optimizer.step()
        clip_grad_norm_([p for t in pair for p in t.params], 1.0)  # wrong

    with fastclip.order_guard([t.optimizer for t in pair]):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)


def test_one_sampled_parameter_in_many() -> None:
    """Layer by layer, and with more parameters than are looked at."""
    t = Training()
    t.model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(50)])
    t.params = list(t.model.parameters())
    t.optimizer = torch.optim.SGD([{"params": [p]} for p in t.params], lr=0.1)

    def loop() -> None:
        for _ in range(2):
            t.backward()
            for p in t.params:
                clip_grad_norm_(p, 1.0)  # wrong

    with fastclip.order_guard(t.optimizer):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)


def many() -> list[torch.nn.Parameter]:
    """More parameters than are looked at."""
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(64)]


def backward(params: list[torch.nn.Parameter]) -> None:
    torch.stack([p.sum() for p in params]).sum().backward()


def step_then_clip(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(params)
    optimizer.step()
    clip_grad_norm_(params, 1.0)  # wrong


def test_all_but_one_frozen() -> None:
    params = many()
    for p in params:
        p.requires_grad_(p is params[13])

    def loop() -> None:
        for _ in range(2):
            backward(params[13:14])
            clip_grad_norm_(params, 1.0)  # wrong

    optimizer = torch.optim.SGD(params, lr=0.1)
    with fastclip.order_guard(optimizer):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)


def test_a_clip_of_the_last_half() -> None:
    params = many()

    def loop() -> None:
        for _ in range(2):
            backward(params)
            clip_grad_norm_(params[32:], 1.0)  # wrong

    optimizer = torch.optim.SGD(params, lr=0.1)
    with fastclip.order_guard(optimizer):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)


def test_gradients_of_none_of_those_looked_at_before() -> None:
    params = many()
    optimizer = torch.optim.SGD(params, lr=0.1)
    with fastclip.order_guard(optimizer) as guard:
        optimizer.step()
        for part in (params[13:14], params[7:9]):
            (warning,) = warned(functools.partial(step_then_clip, part, optimizer))
            assert warning.lineno == line_of(step_then_clip)
            guard._warned.clear()


def test_a_clip_of_gradients_thrown_away_does_not_count() -> None:
    t = Training()

    def loop() -> None:
        t.backward()
        t.clip(t.params, 1.0)
        t.zero_grad()
        t.backward()
        t.optimizer.step()
        t.clip(t.params, 1.0)  # wrong

    with fastclip.order_guard(t.optimizer):
        (warning,) = warned(loop)
    assert warning.lineno == line_of(loop)
