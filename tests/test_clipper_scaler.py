"""GradClipper with torch.amp.GradScaler against unscale_, clip_grad_norm_, step, update."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import GradClipper
from tests import training
from tests.training import BAD, FUSED, backward, make_scaler

MAX_NORM = 5.0
RELATIVE = 1e-6
OPTIMIZERS = [*FUSED, "adam-foreach", "momentum-foreach", "dampening-loop", "rmsprop-foreach"]
SOME = ["adam-fused", "momentum-fused", "adagrad-fused", "adamw-foreach", "momentum-loop"]


def torch_step(
    optimizer: Optimizer, scaler: GradScaler, clipped: Iterable[Tensor], max_norm: float = MAX_NORM
) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(clipped, max_norm)
    scaler.step(optimizer)
    scaler.update()


class Pair:
    """The same training twice: with a clipper, and as torch's documentation has it."""

    def __init__(self, optimizer: str, scale: float = 2.0**13, policy: Any = "skip") -> None:
        self.ours, self.theirs = training.parameters(), training.parameters()
        self.our_optimizer = training.optimizer(optimizer, self.ours)
        # torch's fused SGD has garbage for momentum once its first step was skipped
        fused_momentum = optimizer in ("momentum-fused", "nesterov-fused", "dampening-fused")
        other = optimizer.replace("fused", "foreach") if fused_momentum else optimizer
        self.their_optimizer = training.optimizer(other, self.theirs)
        self.our_scaler, self.their_scaler = make_scaler(scale), make_scaler(scale)
        self.clipper = GradClipper(self.ours.items(), MAX_NORM, nonfinite=policy)

    def backward(self, grads: training.Gradients, half: bool = False) -> None:
        backward(self.ours, grads, self.our_scaler, half)
        backward(self.theirs, grads, self.their_scaler, half)

    def torch_step(self) -> None:
        torch_step(self.their_optimizer, self.their_scaler, self.theirs.values())

    def compare(self, step: int = -1) -> None:
        where = f"after step {step}"
        assert self.our_scaler.state_dict() == self.their_scaler.state_dict(), where
        training.near(self.ours, self.theirs, RELATIVE, when=where)
        ours, theirs = training.moments(self.our_optimizer), training.moments(self.their_optimizer)
        if ours and theirs:  # before its first step an optimizer has none, or a fused one zeros
            training.near(ours, theirs, RELATIVE, when=where)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_300_steps_of_fp16(optimizer: str) -> None:
    """Overflows of a growing scale, injected ones from the first step on, and tensors without a
    gradient."""
    injected = {step: BAD[step % 3] for step in (0, 40, 41, 100, 250)}
    pair = Pair(optimizer)
    skipped = 0
    for step, grads in enumerate(training.stream(300, bad=injected)):
        seen = grads if step % 7 != 3 else {k: v for k, v in grads.items() if k != "layer.bias"}
        pair.backward(seen, half=True)
        scaled = pair.our_scaler.get_scale()
        overflow = any(
            p.grad is not None and not p.grad.isfinite().all() for p in pair.ours.values()
        )
        unscaled = [p.grad / scaled for p in pair.ours.values() if p.grad is not None]
        stats = pair.clipper.step(pair.our_optimizer, pair.our_scaler)
        pair.our_scaler.update()
        pair.torch_step()
        if overflow or step % 10 == 0:
            pair.compare(step)
        skipped += overflow
        assert bool(stats.skipped) == overflow == stats.found_inf.item()
        if not overflow:
            norm = training.total(unscaled)
            assert stats.total_norm.item() == pytest.approx(norm, rel=1e-6)
            assert stats.coef.item() == pytest.approx(min(1, MAX_NORM / (norm + 1e-6)), rel=1e-6)
            largest = [float(grad.abs().max()) for grad in unscaled]
            assert stats.max_abs.tolist() == pytest.approx(largest, rel=1e-6)
            assert stats.threshold.item() == MAX_NORM
        assert not training.nonfinite(pair.our_optimizer)
    assert skipped > len(injected), "the scale itself was to overflow too"
    assert (training.counted(pair.clipper)[0], training.counted(pair.clipper)[2]) == (300, skipped)
    pair.compare(300)


@pytest.mark.parametrize("scale", [1000.0, 3.0, 1.0, 2.0**-10, 2.0**40], ids=str)
@pytest.mark.parametrize("optimizer", ["adam-fused", "sgd-foreach"])
def test_any_loss_scale(optimizer: str, scale: float) -> None:
    """To rounding also where the scale is no power of two."""
    pair = Pair(optimizer, scale)
    for step, grads in enumerate(training.stream(20, bad={5: math.inf})):
        pair.backward(grads)
        scale = pair.our_scaler.get_scale()
        stats = pair.clipper.step(pair.our_optimizer, pair.our_scaler)
        assert stats.loss_scale is not None
        assert stats.loss_scale.item() == pytest.approx(scale, rel=1e-6)
        pair.our_scaler.update()
        pair.torch_step()
        pair.compare(step)
        if step != 5:
            assert stats.total_norm.item() == pytest.approx(training.total(grads), rel=1e-6)
    assert pair.clipper.measure().loss_scale is None


@pytest.mark.parametrize("optimizer", SOME)
def test_clip_and_then_the_scaler(optimizer: str) -> None:
    """clip_(optimizer, scaler), scaler.step, scaler.update: gradients are unscaled and clipped."""
    pair = Pair(optimizer)
    for step, grads in enumerate(training.stream(40, bad={4: math.nan, 9: math.inf})):
        pair.backward(grads)
        before = training.gradients(pair.ours)
        stats = pair.clipper.clip_(optimizer=pair.our_optimizer, scaler=pair.our_scaler)
        pair.their_scaler.unscale_(pair.their_optimizer)
        torch.nn.utils.clip_grad_norm_(pair.theirs.values(), MAX_NORM)
        now, theirs = training.gradients(pair.ours), training.gradients(pair.theirs)
        if step in (4, 9):
            training.same(now, before, when="a skip leaves the scaled gradients")
            assert bool(stats.skipped)
        else:
            training.near(now, theirs, RELATIVE)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            pair.our_scaler.unscale_(pair.our_optimizer)
        for scaler, optimizer_ in (
            (pair.our_scaler, pair.our_optimizer),
            (pair.their_scaler, pair.their_optimizer),
        ):
            scaler.step(optimizer_)
            scaler.update()
        pair.compare(step)


@pytest.mark.parametrize("optimizer", SOME)
def test_unscaled_by_the_user(optimizer: str) -> None:
    pair = Pair(optimizer)
    for step, grads in enumerate(training.stream(40, bad={0: math.nan, 9: math.inf})):
        pair.backward(grads)
        pair.our_scaler.unscale_(pair.our_optimizer)
        stats = pair.clipper.step(pair.our_optimizer, pair.our_scaler)
        pair.our_scaler.update()
        pair.torch_step()
        pair.compare(step)
        assert bool(stats.skipped) == (step in (0, 9))
        if step not in (0, 9):
            assert stats.total_norm.item() == pytest.approx(training.total(grads), rel=1e-6)


@pytest.mark.parametrize("optimizer", SOME)
def test_what_the_scaler_found_counts(optimizer: str) -> None:
    """The overflow it saw in unscale_ skips the step though the gradients were mended since."""
    params = training.parameters()
    made, scaler = training.optimizer(optimizer, params), make_scaler()
    clipper = training.clipper(params, "ZClip")
    first, bad = training.stream(2, bad={1: math.inf})
    backward(params, first, scaler)
    clipper.step(made, scaler)
    scaler.update()
    before = training.snapshot([training.values(params), made.state_dict()["state"]])
    rule, scale = training.rule_state(clipper), scaler.get_scale()
    backward(params, bad, scaler)
    scaler.unscale_(made)
    for parameter in params.values():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    stats = clipper.step(made, scaler)
    scaler.update()
    now = [training.values(params), made.state_dict()["state"]]
    training.same(now, before)
    training.same(training.rule_state(clipper), rule)
    assert (stats.found_inf.item(), bool(stats.skipped)) == (1.0, True)
    assert training.counted(clipper)[2:] == (1, 1)
    assert scaler.get_scale() == scale / 2


@pytest.mark.parametrize("optimizer", SOME)
def test_propagate_is_torch(optimizer: str) -> None:
    """The scaler skips such a step all the same; but the gradients are what torch makes of them,
    with a fused optimizer those of clip_."""
    pair = Pair(optimizer, policy="propagate")
    for step, grads in enumerate(training.stream(20, bad={0: math.nan, 9: math.inf})):
        pair.backward(grads)
        if step == 9 or "fused" not in optimizer:
            stats = pair.clipper.clip_(pair.our_optimizer, pair.our_scaler)
            pair.our_scaler.step(pair.our_optimizer)
        else:
            stats = pair.clipper.step(pair.our_optimizer, pair.our_scaler)
        pair.our_scaler.update()
        pair.torch_step()
        pair.compare(step)
        assert stats.found_inf.item() == float(step in (0, 9))
        if step == 9 or "fused" not in optimizer:
            theirs = training.gradients(pair.theirs)
            for name, grad in training.gradients(pair.ours).items():
                torch.testing.assert_close(grad, theirs[name], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("optimizer", SOME)
def test_a_rule_of_its_own(optimizer: str) -> None:
    """Thresholds are of the unscaled norms: the same with and without a scale that changes."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer = training.optimizer(optimizer, ours)
    their_optimizer = training.optimizer(optimizer, theirs)
    for name in training.RULES:
        scaler = make_scaler(growth_interval=4)
        scaled, plain = training.clipper(ours, name), training.clipper(theirs, name)
        for grads in training.stream(30):
            backward(ours, grads, scaler)
            training.assign(theirs, grads)
            a, b = scaled.step(our_optimizer, scaler), plain.step(their_optimizer)
            scaler.update()
            torch.testing.assert_close(a.threshold, b.threshold, rtol=1e-6, atol=0)
            torch.testing.assert_close(a.coef, b.coef, rtol=1e-6, atol=0)
    training.near(ours, theirs, 2e-6)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 3.0, math.inf])
def test_norm_types(norm_type: float) -> None:
    params, scaler = training.parameters(), make_scaler()
    made = training.optimizer("adam-fused", params)
    clipper = GradClipper(params.items(), MAX_NORM, norm_type=norm_type)
    for grads in training.stream(4):
        backward(params, grads, scaler)
        stats = clipper.step(made, scaler)
        scaler.update()
        assert stats.total_norm.item() == pytest.approx(training.total(grads, norm_type), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [3e-4, 1000.0])
def test_half_gradients(dtype: torch.dtype, max_norm: float) -> None:
    """As float32 copies, unscaled and clipped by torch and rounded once: float16 is denormal
    after that where the scaled gradient is not, and torch refuses to unscale it."""
    ours, theirs = training.parameters(dtype), training.parameters()
    our_optimizer, their_optimizer = (
        torch.optim.SGD(side.values(), lr=0.01) for side in (ours, theirs)
    )
    clipper = GradClipper(ours.items(), max_norm)
    our_scaler, their_scaler = (make_scaler(2.0**10, 1000) for _ in "ab")
    for step, grads in enumerate(training.stream(12, bad={4: math.inf})):
        for scaler in (our_scaler, their_scaler):
            scaler.scale(torch.zeros(()))
        scale = our_scaler.get_scale()
        scaled = {name: (grad * 1e-4 * scale).to(dtype) for name, grad in grads.items()}
        training.assign(ours, scaled)
        training.assign(theirs, scaled)
        stats = clipper.clip_(our_optimizer, our_scaler)
        their_scaler.unscale_(their_optimizer)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        if step != 4:
            assert stats.total_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            for name, parameter in ours.items():
                expected, grad = theirs[name].grad, parameter.grad
                assert expected is not None
                assert grad is not None
                info = torch.finfo(dtype)
                spacing = info.eps * info.smallest_normal
                torch.testing.assert_close(
                    grad.double(), expected.double(), rtol=0.51 * info.eps, atol=0.51 * spacing
                )
        for scaler, made in ((our_scaler, our_optimizer), (their_scaler, their_optimizer)):
            scaler.step(made)
            scaler.update()
        assert our_scaler.get_scale() == their_scaler.get_scale()
        assert bool(stats.skipped) == (step == 4)
    assert our_scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["adam-fused", "adagrad-fused"])
def test_fused_steps_of_half_parameters(optimizer: str, dtype: torch.dtype) -> None:
    """As the foreach optimizer's within the rounding of parameters in that dtype. Not SGD, of which
    torch's fused one leaves most such parameters as they are (test_half_precision_page)."""
    sides = training.parameters(dtype), training.parameters(dtype)
    names = optimizer, optimizer.replace("fused", "foreach")
    made = [training.optimizer(name, side) for name, side in zip(names, sides, strict=True)]
    scalers, clippers = [make_scaler(2.0**6) for _ in sides], [training.clipper(s) for s in sides]
    for step, grads in enumerate(training.stream(20, bad={0: math.nan, 9: math.inf})):
        for i, side in enumerate(sides):
            scale = scalers[i].scale(torch.ones(()))
            training.assign(side, {name: grad * scale for name, grad in grads.items()})
            skipped = bool(clippers[i].step(made[i], scalers[i]).skipped)
            scalers[i].update()
            assert skipped == (step in (0, 9))
        assert scalers[0].state_dict() == scalers[1].state_dict()
    training.near(*sides, 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_an_embedding(sparse: bool) -> None:
    """Gradients of rows that come twice, of a sparse one added up before they are measured."""
    ours, theirs = (
        torch.nn.Embedding(10, 4, sparse=sparse and s == "ours") for s in ("ours", "theirs")
    )
    ours.load_state_dict(theirs.state_dict())
    made = [torch.optim.SGD(side.parameters(), lr=0.1) for side in (ours, theirs)]
    scalers = [make_scaler(8.0), make_scaler(8.0)]
    clipper = GradClipper(ours, 0.5)
    for step in range(6):
        for side, optimizer, scaler in zip((ours, theirs), made, scalers, strict=True):
            optimizer.zero_grad()
            loss = side(torch.tensor([1, 2, 2, 7])).square().sum()
            scaler.scale(loss * (math.inf if step == 2 else 1)).backward()
        clipper.step(made[0], scalers[0])
        scalers[0].update()
        torch_step(made[1], scalers[1], theirs.parameters(), 0.5)
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    assert training.counted(clipper) == (6, 5, 1, 0)
    assert scalers[0].state_dict() == scalers[1].state_dict()
