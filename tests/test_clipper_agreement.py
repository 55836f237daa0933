"""GradClipper.step against torch's way: clip the gradients, then let the optimizer step."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fastclip
from fastclip import GradClipper
from tests import training
from tests.training import FUSED, ONE_COEFFICIENT, OPTIMIZERS, PER_TENSOR, Parameters

STEPS = 200
RELATIVE = 1e-6

# All optimizers with one rule; with the others those whose state differs in kind.
KINDS = ("adam-", "momentum-", "adagrad-")
PAIRS = [
    (rule, optimizer)
    for rule in ONE_COEFFICIENT
    for optimizer in OPTIMIZERS
    if rule == "MaxNorm" or optimizer.startswith(KINDS)
]


def compare(
    ours: tuple[Parameters, Optimizer], theirs: tuple[Parameters, Optimizer], relative: float
) -> None:
    """Parameters, moments and step counters."""
    training.near(ours[0], theirs[0], relative)
    training.near(training.moments(ours[1]), training.moments(theirs[1]), relative)


@pytest.mark.parametrize(("rule", "optimizer"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_one_coefficient(rule: str, optimizer: str) -> None:
    """200 steps, and in some of them a tensor without a gradient."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper, plain = training.clipper(ours, rule), training.plain_rule(rule)
    clipped = 0
    for step, grads in enumerate(training.stream(STEPS)):
        seen: Mapping[str, Tensor | None] = grads
        if step % 7 == 3:
            seen = grads | {"layer.bias": None}
        training.assign(ours, seen)
        training.assign(theirs, seen)
        norm = training.total(seen)
        stats = clipper.step(our_optimizer)
        plain.clip_(theirs.values())
        after = training.total(training.gradients(theirs))
        their_optimizer.step()
        assert stats.total_norm.item() == pytest.approx(norm, rel=1e-6)
        assert stats.coef.item() == pytest.approx(after / norm, rel=2e-6)
        assert stats.clipped.item() == (stats.coef.item() < 1)
        clipped += bool(stats.clipped)
    assert STEPS // 20 < clipped < STEPS, "a test of both clipped and other steps"
    assert training.counted(clipper) == (STEPS, clipped, 0, 0)
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)


@pytest.mark.parametrize("optimizer", ["adam-fused", "adam-foreach", "momentum-fused", "sgd-loop"])
@pytest.mark.parametrize("rule", PER_TENSOR)
def test_a_coefficient_per_tensor(rule: str, optimizer: str) -> None:
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper, plain = training.clipper(ours, rule), training.plain_rule(rule)
    clipped = 0
    for grads in training.stream(STEPS):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        stats = clipper.step(our_optimizer)
        plain.clip_(theirs.values())
        left = [p.grad for p in theirs.values() if p.grad is not None]
        their_optimizer.step()
        assert stats.coef.shape == stats.threshold.shape == (len(grads),)
        if rule == "AdaGC":  # for AGC a tensor has several: the smallest is asked for below
            norms = zip(left, grads.values(), strict=True)
            expected = [training.total([a]) / training.total([b]) for a, b in norms]
            assert stats.coef.tolist() == pytest.approx(expected, rel=2e-6)
        assert stats.clipped.item() == (stats.coef.min().item() < 1)
        clipped += bool(stats.clipped)
    assert STEPS // 20 < clipped <= STEPS
    assert training.counted(clipper) == (STEPS, clipped, 0, 0)
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)


def test_agc_reports_the_smallest_of_a_tensors_units() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], requires_grad=True)
    bias = torch.tensor([6.0, 8.0], requires_grad=True)
    weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.003, 0.004]])
    bias.grad = torch.tensor([0.0, 5.0])
    rule = fastclip.rules.AGC(clip_factor=0.1, eps=1e-3)
    stats = GradClipper([weight, bias], rule=rule).clip_()
    # Thresholds of the rows: 0.1 of the norms 5, 0 (so of eps) and 1.
    expected = torch.tensor([[0.0, 0.5], [1e-4, 0.0], [0.003, 0.004]])
    torch.testing.assert_close(weight.grad, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(bias.grad, torch.tensor([0.0, 1.0]), rtol=1e-6, atol=0)
    assert stats.threshold.tolist() == pytest.approx([1e-4, 1.0], rel=1e-6)
    assert stats.coef.tolist() == pytest.approx([1e-4, 0.2], rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "momentum-fused", "adagrad-fused"])
def test_parameters_of_several_dtypes(optimizer: str) -> None:
    ours, theirs = training.parameters(), training.parameters()
    for params in (ours, theirs):
        params["layer.weight"] = torch.nn.Parameter(params["layer.weight"].double().detach())
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper = GradClipper(ours.items(), 5.0)
    for grads in training.stream(50):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        stats = clipper.step(our_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 5.0)
        their_optimizer.step()
    assert stats.total_norm.dtype == stats.coef.dtype == torch.float64
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)


@pytest.mark.parametrize("optimizer", ["adam-fused", "momentum-fused", "adagrad-foreach"])
def test_float64_parameters_to_float64_precision(optimizer: str) -> None:
    """A fused optimizer takes a coefficient in float32: too coarse for these."""
    ours, theirs = training.parameters(torch.float64), training.parameters(torch.float64)
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper = GradClipper(ours.items(), 5.0)
    for grads in training.stream(50):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clipper.step(our_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 5.0)
        their_optimizer.step()
    compare((ours, our_optimizer), (theirs, their_optimizer), 1e-13)


@pytest.mark.parametrize("max_norm", [0.0, 1e-30, math.inf])
@pytest.mark.parametrize("optimizer", FUSED)
def test_extreme_thresholds(optimizer: str, max_norm: float) -> None:
    """0: the optimizer sees gradients of 0, and its moments and counters go on."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper = GradClipper(ours.items(), max_norm)
    for grads in training.stream(5):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        stats = clipper.step(our_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        their_optimizer.step()
        assert stats.clipped.item() == math.isfinite(max_norm)
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)


# The coefficient is about 1 / norm: its inverse, which a fused optimizer divides by, is a float32.
HUGE = [
    pytest.param(torch.float32, 1e30, id="1e30"),
    pytest.param(torch.float32, 3e38, id="norm-beyond-float32"),
    pytest.param(torch.bfloat16, 3e38, id="bfloat16-norm-beyond-float32"),
    pytest.param(torch.float64, 1e100, id="float64-1e100"),
    pytest.param(torch.float64, 1e-100, id="float64-1e-100"),
]


@pytest.mark.parametrize(("dtype", "size"), HUGE)
@pytest.mark.parametrize("optimizer", ["sgd-fused", "momentum-fused", "sgd-foreach", "sgd-loop"])
def test_huge_finite_gradients_are_clipped(optimizer: str, dtype: torch.dtype, size: float) -> None:
    """Where torch's float32 norm is infinite, and the step lost."""
    params = {name: torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for name in "abcd"}
    made = training.optimizer(optimizer, params, lr=1.0, weight_decay=0.0)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=dtype)
    for parameter in params.values():
        parameter.grad = signs * size
    max_norm = min(1.0, size)
    stats = GradClipper(params.items(), max_norm).step(made)
    # SGD's first step is the gradient itself, the first group's times its learning rate of 0.02.
    norm = 4 * torch.full((), size, dtype=dtype).item()
    expected = norm / 4 * max_norm / (norm + 1e-6)
    for parameter, rate in zip(params.values(), (0.02, 1.0, 1.0, 1.0), strict=True):
        moved = parameter.detach().double() / rate
        # A coefficient of 1e-39 is a denormal float32: half its spacing is 8e-7 of it.
        tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(moved, -signs.double() * expected, rtol=tolerance, atol=0)
    assert stats.found_inf.item() == 0.0
    assert not stats.skipped
    assert stats.coef.double().item() == pytest.approx(max_norm / (norm + 1e-6), rel=1e-5)
    beyond = dtype != torch.float64 and norm > torch.finfo(torch.float32).max
    assert stats.total_norm.item() == (math.inf if beyond else pytest.approx(norm, rel=1e-6))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf, 0.0])
@pytest.mark.parametrize("optimizer", ["adam-fused", "momentum-foreach"])
def test_norm_types(optimizer: str, norm_type: float) -> None:
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    grads = training.stream(30)
    max_norm = 0.9 * sorted(training.total(g, norm_type) for g in grads)[15]
    clipper = GradClipper(ours.items(), max_norm, norm_type=norm_type)
    for one in grads:
        training.assign(ours, one)
        training.assign(theirs, one)
        stats = clipper.step(our_optimizer)
        # torch adds up the counts of non-zeros only since the count is their norm of order 1
        norm = training.total(one, norm_type)
        torch.nn.utils.clip_grads_with_norm_(theirs.values(), max_norm, torch.tensor(norm))
        their_optimizer.step()
        assert stats.total_norm.item() == pytest.approx(norm, rel=1e-6)
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)


@pytest.mark.parametrize("optimizer", ["adam-fused", "adam-foreach"])
def test_clip_and_then_the_optimizer(optimizer: str) -> None:
    """clip_ rescales in place: what steps afterwards is the caller's."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    clipper = GradClipper(ours.items(), 5.0)
    for step, grads in enumerate(training.stream(40)):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clipper.clip_() if step % 2 else clipper.clip_(optimizer=our_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 5.0)
        training.near(training.gradients(ours), training.gradients(theirs), RELATIVE)
        our_optimizer.step()
        their_optimizer.step()
    assert training.counted(clipper)[0] == 40
    compare((ours, our_optimizer), (theirs, their_optimizer), RELATIVE)
