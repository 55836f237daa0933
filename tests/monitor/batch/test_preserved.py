"""Looking at a batch changes nothing: every tensor, hook, mode and generator, bit for bit."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.monitor import compare_precisions, find_first_nonfinite
from tests.monitor.batch.cases import CASES, Case, Forward, batch, healthy, rewriting
from tests.monitor.batch.parts import Apply
from tests.monitor.batch.photographs import photograph

Look = Callable[[nn.Module, Forward], Any]

LOOKS = pytest.mark.parametrize(
    "look", [find_first_nonfinite, compare_precisions], ids=["origin", "precisions"]
)


class Interrupted(Exception):
    """Raised on purpose."""


def with_gradients(model: nn.Module) -> None:
    """A gradient for every second parameter, and one module in another mode."""
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    list(model.modules())[-1].eval()


def with_hooks(model: nn.Module, log: list[str]) -> None:
    """Of every kind that may be on a module or a parameter."""
    for name, module in model.named_modules():
        for word in ("first", "second"):
            module.register_forward_pre_hook(lambda *_, x=f"{word} before {name}": log.append(x))
            module.register_forward_hook(lambda *_, x=f"{word} after {name}": log.append(x))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, x=f"gradient of {name}": log.append(x))
        parameter.register_post_accumulate_grad_hook(lambda _, x=f"sum {name}": log.append(x))


@LOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_changes(case: Case, look: Look) -> None:
    model, forward = case.build()
    with_gradients(model)
    before = photograph(model)
    look(model, forward)
    assert photograph(model) == before


@LOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_changes_when_forward_raises(case: Case, look: Look) -> None:
    model, forward = case.build()
    with_gradients(model)

    def interrupted() -> Tensor:
        forward()
        random.random(), np.random.random()
        raise Interrupted

    before = photograph(model)
    with pytest.raises(Interrupted):
        look(model, interrupted)
    assert photograph(model) == before


@LOOKS
@pytest.mark.parametrize("kind", ["pre-hook", "hook", "gradient hook", "module"])
def test_nothing_changes_when_a_part_raises(kind: str, look: Look) -> None:
    model, forward = healthy()

    def broken(*_: Any) -> None:
        raise Interrupted

    if kind == "module":
        model.append(Apply(broken))
    elif kind == "gradient hook":
        next(iter(model.parameters())).register_hook(broken)
    elif kind == "hook":
        model[4].register_forward_hook(broken)
    else:
        model[4].register_forward_pre_hook(broken)
    with_gradients(model)
    before = photograph(model)
    with pytest.raises(Interrupted):
        look(model, forward)
    assert photograph(model) == before


@LOOKS
def test_the_hooks_of_others_stay_in_order(look: Look) -> None:
    log: list[str] = []
    model, forward = healthy()
    with_hooks(model, log)
    for dtype in [None] if look is find_first_nonfinite else [None, torch.bfloat16, torch.float16]:
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            loss = forward()
        loss.backward()
    expected, log[:] = list(log), []
    model.zero_grad()
    before = photograph(model)
    look(model, forward)
    assert photograph(model) == before
    # Nothing acts on the accumulated gradients.
    assert log == [line for line in expected if not line.startswith("sum ")]
    log[:] = []
    forward().backward()
    assert log == expected[: len(log)]
    assert {line.split()[0] for line in log} == {"first", "second", "gradient", "sum"}


@LOOKS
def test_frozen_by_forward(look: Look) -> None:
    """As the other half of a pair of models is, and then not thawed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    before = photograph(model)
    look(model, lambda: model[1](model[0].requires_grad_(False)(batch(3, 4))).sum())
    assert photograph(model) == before


@LOOKS
def test_a_graph_written_into_a_buffer(look: Look) -> None:
    """A state that is carried from batch to batch, in place."""
    model = nn.Linear(4, 4)
    state = torch.ones(3, 4)
    model.register_buffer("state", state)
    before = photograph(model)
    look(model, lambda: state.detach_().add_(model(batch(3, 4))).sum())
    assert photograph(model) == before
    assert state.grad_fn is None


class OwnDropout(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator = torch.Generator("cpu").manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.3)


@LOOKS
def test_a_generator_of_a_module(look: Look) -> None:
    dropout = OwnDropout()
    model = nn.Sequential(nn.Linear(4, 8), dropout, nn.Linear(8, 1))
    before = dropout.generator.get_state()
    look(model, lambda: model(batch(6, 4)).sum())
    assert torch.equal(dropout.generator.get_state(), before)
    once, twice = (compare_precisions(model, lambda: model(batch(6, 4)).sum()) for _ in range(2))
    assert once == twice


@LOOKS
def test_full_backward_hooks_of_others(look: Look) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
    seen: list[str] = []
    for module in model:
        module.register_full_backward_pre_hook(lambda m, _: seen.append(f"before {type(m)}"))
        module.register_full_backward_hook(lambda m, *_: seen.append(f"after {type(m)}"))
    before = photograph(model)
    look(model, lambda: model(batch(3, 4).requires_grad_()).sum())
    assert photograph(model) == before
    assert len(seen) == 6 * (1 if look is find_first_nonfinite else 3)


@LOOKS
def test_an_optimizer_in_the_backward_pass_does_not_step(look: Look) -> None:
    model, forward = healthy()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = photograph(model)
    look(model, forward)
    assert photograph(model) == before
    assert not any(optimizer.state for optimizer in optimizers.values())
    forward().backward()
    assert all(optimizer.state for optimizer in optimizers.values())


@LOOKS
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
def test_gradients_outside_the_model(reentrant: bool, look: Look) -> None:
    """Of the batch and of a second model, also where only a checkpoint's second run shows them."""
    (model, _), second = healthy(), nn.Linear(3, 2)
    x = batch(16, 4).requires_grad_()
    x.grad = torch.ones(16, 4)
    second.bias.grad = torch.ones(2)
    before = photograph(model, x, second.weight, second.bias)
    look(model, lambda: checkpoint(second, model(x), use_reentrant=reentrant).sum())
    assert photograph(model, x, second.weight, second.bias) == before


@LOOKS
def test_a_loss_that_is_a_leaf(look: Look) -> None:
    (model, _), leaf = healthy(), torch.ones((), requires_grad=True)
    before = photograph(model, leaf)
    look(model, lambda: leaf)
    assert photograph(model, leaf) == before


@LOOKS
def test_a_graph_of_the_caller_stays_valid(look: Look) -> None:
    """Versions are what autograd compares: nothing may write to a parameter it saved."""
    model, forward = healthy()
    model.eval()
    loss = forward()
    look(model, forward)
    loss.backward()
    again = forward()
    weight = model.get_parameter("0.weight")
    (expected,) = torch.autograd.grad(again, [weight])
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


@LOOKS
def test_within_the_autocast_of_the_caller(look: Look) -> None:
    """Neither mode nor the casts kept for the caller's own graph are touched."""
    model, forward = healthy()
    model.eval()
    weight = model.get_parameter("0.weight")
    (expected,) = torch.autograd.grad(forward(), [weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = photograph(model)
        loss = forward()
        look(model, forward)
        assert photograph(model) == before
        assert torch.equal(forward(), loss)
    loss.backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0.1, atol=0.01)


def test_each_precision_starts_from_the_same_state() -> None:
    """Running statistics, dropout and power iterations: twice the same precision agrees."""
    for model, forward in (healthy(), rewriting()):
        first = compare_precisions(model, forward, ["fp32"])
        assert compare_precisions(model, forward, ["bf16", "fp32"])["fp32"] == first["fp32"]


def test_python_and_numpy_draw_the_same_in_each() -> None:
    drawn: list[tuple[float, float, float]] = []
    model = nn.Linear(1, 1)

    def forward() -> Tensor:
        drawn.append((random.random(), float(np.random.random()), torch.rand(()).item()))
        return model(torch.ones(1)).sum()

    compare_precisions(model, forward)
    assert len(drawn) == 3
    assert len(set(drawn)) == 1
    assert (random.random(), np.random.random(), torch.rand(()).item()) == drawn[0]
