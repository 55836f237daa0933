"""A loss scaler and a clipper together: the order of calls, and who owns which parameters."""

import math

import pytest
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import GradClipper
from tests import training
from tests.training import Parameters, backward, make_scaler

MAX_NORM = 5.0
RELATIVE = 1e-6
SOME = ["adam-fused", "adagrad-fused", "adamw-foreach", "momentum-loop"]


def trained(optimizer: str = "adam-fused") -> tuple[Parameters, Optimizer, GradClipper, GradScaler]:
    """After one good step."""
    params = training.parameters()
    made, scaler = training.optimizer(optimizer, params), make_scaler()
    clipper = training.clipper(params, "ZClip")
    backward(params, training.stream(1)[0], scaler)
    clipper.step(made, scaler)
    scaler.update()
    return params, made, clipper, scaler


@pytest.mark.parametrize("first", ["step", "scaler.step"])
@pytest.mark.parametrize("then", ["step", "clip_"])
@pytest.mark.parametrize("optimizer", ["adam-fused", "adam-foreach"])
def test_already_stepped(optimizer: str, first: str, then: str) -> None:
    params, made, clipper, scaler = trained(optimizer)
    grads = training.stream(2)[1]
    backward(params, grads, scaler)
    clipper.step(made, scaler) if first == "step" else scaler.step(made)
    training.assign(params, grads)
    state = [training.values(params), training.gradients(params), clipper.state_dict()]
    before = training.snapshot([*state, made.state_dict()["state"]])
    with pytest.raises(RuntimeError, match=r"step.*update") as raised:
        clipper.step(made, scaler) if then == "step" else clipper.clip_(made, scaler)
    assert "backward" in str(raised.value), "the message names the right order"
    state = [training.values(params), training.gradients(params), clipper.state_dict()]
    training.same([*state, made.state_dict()["state"]], before)
    scaler.update()
    backward(params, grads, scaler)
    assert not clipper.step(made, scaler).skipped


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("optimizer", ["adam-fused", "dampening-fused", "dampening-foreach"])
def test_a_second_step_is_refused(optimizer: str, bad: bool) -> None:
    """Also after a very first one that was skipped, which not every fused optimizer does itself."""
    params, scaler = training.parameters(), make_scaler()
    made, clipper = training.optimizer(optimizer, params), training.clipper(params)
    backward(params, training.stream(1, bad={0: math.nan} if bad else {})[0], scaler)
    clipper.step(made, scaler)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(made)
    with pytest.raises(RuntimeError, match="update"):
        clipper.step(made, scaler)


@pytest.mark.parametrize("call", ["step", "clip_"])
def test_a_scaler_that_scaled_nothing(call: str) -> None:
    params = training.parameters()
    made, clipper = training.optimizer("adam-foreach", params), training.clipper(params)
    training.assign(params, training.stream(1)[0])
    before = training.snapshot([training.values(params), training.gradients(params)])
    with pytest.raises(RuntimeError, match=r"scaler\.scale"):
        getattr(clipper, call)(made, make_scaler())
    training.same([training.values(params), training.gradients(params)], before)
    assert training.counted(clipper) == (0, 0, 0, 0)


def test_clip_with_a_scaler_needs_the_optimizer() -> None:
    params, _, clipper, scaler = trained()
    backward(params, training.stream(1)[0], scaler)
    before = training.gradients(params)
    with pytest.raises(TypeError, match="optimizer"):
        clipper.clip_(scaler=scaler)
    training.same(training.gradients(params), before)


@pytest.mark.parametrize("call", ["step", "clip_"])
def test_zero_would_hide_an_overflow_from_the_scaler(call: str) -> None:
    params, made, _, scaler = trained()
    clipper = training.clipper(params, nonfinite="zero")
    backward(params, training.stream(1)[0], scaler)
    before = training.snapshot([training.values(params), training.gradients(params)])
    with pytest.raises(ValueError, match="zero"):
        getattr(clipper, call)(made, scaler)
    training.same([training.values(params), training.gradients(params)], before)


@pytest.mark.parametrize("call", ["step", "clip_"])
def test_error_raises_on_an_overflow(call: str) -> None:
    params, made, _, scaler = trained()
    clipper = training.clipper(params, nonfinite="error")
    backward(params, training.stream(1, bad={0: math.inf})[0], scaler)
    before = training.snapshot([training.values(params), training.gradients(params)])
    with pytest.raises(RuntimeError, match=r"layer\.weight"):
        getattr(clipper, call)(made, scaler)
    training.same([training.values(params), training.gradients(params)], before)
    assert training.counted(clipper) == (0, 0, 0, 0)


@pytest.mark.parametrize("policy", training.POLICIES)
@pytest.mark.parametrize("optimizer", SOME)
def test_a_disabled_scaler(optimizer: str, policy: str) -> None:
    """As without one."""
    ours, theirs = training.parameters(), training.parameters()
    made = [training.optimizer(optimizer, side) for side in (ours, theirs)]
    clippers = [training.clipper(side, nonfinite=policy) for side in (ours, theirs)]
    scaler = GradScaler("cpu", enabled=False)
    bad = {} if policy == "error" else {4: math.nan}
    for grads in training.stream(8, bad=bad):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clippers[0].step(made[0], scaler)
        scaler.update()
        clippers[1].step(made[1])
    training.same(training.values(ours), training.values(theirs))
    assert training.counted(clippers[0]) == training.counted(clippers[1])
    training.assign(ours, training.stream(1)[0])
    training.assign(theirs, training.stream(1)[0])
    clippers[0].clip_(made[0], scaler)
    clippers[1].clip_()
    training.same(training.gradients(ours), training.gradients(theirs))


@pytest.mark.parametrize("then", ["step", "clip_"])
@pytest.mark.parametrize("first", ["clip_", "unscale_ and clip_"])
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("added", [None, "scale"], ids=["to-all", "to-one-outside"])
def test_a_clip_before_the_last_micro_batch(
    added: str | None, bad: bool, first: str, then: str
) -> None:
    """What a backward adds is still scaled, also where nothing of the clipper's has a part."""
    params, scaler = training.parameters(), make_scaler()
    made = training.optimizer("adam-fused", params)
    clipper = GradClipper([each for each in params.items() if each[0] != "scale"], MAX_NORM)
    grads = training.stream(1, bad={0: math.inf} if bad else {})[0]
    backward(params, grads, scaler)
    if "unscale_" in first:
        scaler.unscale_(made)
    clipper.clip_(made, scaler)
    loss = [p.sum() for name, p in params.items() if added in (None, name)]
    scaler.scale(torch.stack(loss).sum()).backward()
    state = [training.values(params), training.gradients(params), clipper.state_dict()]
    before = training.snapshot(state)
    said = r"scaler\.update\(\), after the last micro-batch"
    with pytest.raises(RuntimeError, match=said) as raised:
        getattr(clipper, then)(made, scaler)
    assert "backward(), then clipper.step(optimizer, scaler=scaler)" in str(raised.value)
    state = [training.values(params), training.gradients(params), clipper.state_dict()]
    training.same(state, before)
    scaler.step(made)
    scaler.update()
    backward(params, training.stream(1)[0], scaler)
    assert not clipper.step(made, scaler).skipped


def test_new_gradients_after_a_clip_are_scaled_too() -> None:
    params, made, clipper, scaler = trained()
    backward(params, training.stream(1)[0], scaler)
    clipper.clip_(made, scaler)
    backward(params, training.stream(1)[0], scaler)  # sets .grad to None first
    with pytest.raises(RuntimeError, match="have been written since"):
        clipper.clip_(made, scaler)
    made.zero_grad()
    assert clipper.clip_(made, scaler).names == ()


@pytest.mark.parametrize("then", ["step", "clip_", "another clipper's step"])
@pytest.mark.parametrize("optimizer", SOME)
def test_a_second_clip_with_no_backward_between(optimizer: str, then: str) -> None:
    """Clips what is unscaled already, as it does after the user's own unscale_."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer, their_optimizer = (training.optimizer(optimizer, s) for s in (ours, theirs))
    our_scaler, their_scaler = make_scaler(), make_scaler()
    first, second = GradClipper(ours.items(), MAX_NORM), GradClipper(ours.items(), MAX_NORM / 2)
    for step, grads in enumerate(training.stream(20, bad={0: math.nan, 9: math.inf})):
        backward(ours, grads, our_scaler)
        backward(theirs, grads, their_scaler)
        first.clip_(our_optimizer, our_scaler)
        if then == "clip_":
            second.clip_(our_optimizer, our_scaler)
            our_scaler.step(our_optimizer)
        else:
            (first if then == "step" else second).step(our_optimizer, our_scaler)
        our_scaler.update()
        their_scaler.unscale_(their_optimizer)
        limit = MAX_NORM if then == "step" else MAX_NORM / 2
        torch.nn.utils.clip_grad_norm_(theirs.values(), limit)
        their_scaler.step(their_optimizer)
        their_scaler.update()
        assert our_scaler.state_dict() == their_scaler.state_dict(), f"step {step}"
        training.near(ours, theirs, RELATIVE, when=f"step {step}")


def test_gradients_changed_by_hand_are_clipped_without_the_scaler() -> None:
    params, made, clipper, scaler = trained()
    backward(params, training.stream(1)[0], scaler)
    clipper.clip_(made, scaler)
    weight = params["layer.weight"].grad
    assert weight is not None
    weight.fill_(MAX_NORM)
    with pytest.raises(RuntimeError, match=r"clipper\.clip_\(\) without the scaler"):
        clipper.clip_(made, scaler)
    stats = clipper.clip_()
    assert stats.clipped
    norm = training.total(training.gradients(params))
    assert norm == pytest.approx(stats.threshold.item(), rel=1e-5)


@pytest.mark.parametrize("bad", [None, "layer.weight", "scale"])
@pytest.mark.parametrize("call", ["step", "clip_"])
@pytest.mark.parametrize("optimizer", SOME)
def test_parameters_outside_the_clipper(optimizer: str, call: str, bad: str | None) -> None:
    """Unscaled and checked as in torch, and not clipped. "scale" is outside here."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer, their_optimizer = (training.optimizer(optimizer, s) for s in (ours, theirs))
    our_scaler, their_scaler = make_scaler(), make_scaler()
    inside = ["embed.weight", "layer.weight"]
    clipper = GradClipper({name: ours[name] for name in inside}.items(), MAX_NORM)
    for step, grads in enumerate(training.stream(20)):
        overflow = bad is not None and step in (0, 9)
        if overflow:
            grads[str(bad)].fill_(math.inf)
        backward(ours, grads, our_scaler)
        backward(theirs, grads, their_scaler)
        if call == "step":
            stats = clipper.step(our_optimizer, our_scaler)
        else:
            stats = clipper.clip_(our_optimizer, our_scaler)
            our_scaler.step(our_optimizer)
        our_scaler.update()
        their_scaler.unscale_(their_optimizer)
        torch.nn.utils.clip_grad_norm_([theirs[name] for name in inside], MAX_NORM)
        their_scaler.step(their_optimizer)
        their_scaler.update()
        assert our_scaler.state_dict() == their_scaler.state_dict(), f"step {step}"
        training.near(ours, theirs, RELATIVE, when=f"step {step}")
        assert stats.names == tuple(inside)
        assert bool(stats.skipped) == overflow == stats.found_inf.item()
    assert training.counted(clipper)[2] == 2 * (bad is not None)


@pytest.mark.parametrize("optimizer", SOME)
def test_parameters_outside_the_optimizer(optimizer: str) -> None:
    """Clipped in place with the others by the one norm, still or again without the loss scale."""
    ours, theirs = training.parameters(), training.parameters()
    some = ("embed.weight", "layer.bias")
    halves = [{name: side[name] for name in some} for side in (ours, theirs)]
    our_optimizer, their_optimizer = (training.optimizer(optimizer, half) for half in halves)
    clipper = training.clipper(ours)
    for grads in training.stream(20):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clipper.step(our_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
        for name in ("layer.weight", "scale"):
            got, want = ours[name].grad, theirs[name].grad
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        their_optimizer.step()
        training.near(ours, theirs, RELATIVE)


def split(params: Parameters) -> list[Parameters]:
    names = list(params)
    return [{name: params[name] for name in part} for part in (names[:2], names[2:])]


@pytest.mark.parametrize("optimizer", SOME)
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_two_optimizers_under_one_norm(optimizer: str, unscaled: bool) -> None:
    """clip_ for both, then the scaler for each. An overflow anywhere skips both: where torch lets
    the other one step, with gradients that the infinite norm has made 0."""
    ours, theirs = training.parameters(), training.parameters()
    our_two, their_two = (
        [training.optimizer(optimizer, part) for part in split(side)] for side in (ours, theirs)
    )
    our_scaler, their_scaler = make_scaler(), make_scaler()
    clipper = training.clipper(ours)
    for step, grads in enumerate(training.stream(30, bad={8: math.inf, 9: math.nan})):
        backward(ours, grads, our_scaler)
        backward(theirs, grads, their_scaler)
        if unscaled:
            for made in our_two:
                our_scaler.unscale_(made)
        stats = clipper.clip_(optimizer=our_two, scaler=our_scaler)
        for made in our_two:
            our_scaler.step(made)
        our_scaler.update()
        for made in their_two:
            their_scaler.unscale_(made)
        if step not in (8, 9):
            norm = torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
            assert stats.total_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            for made in their_two:
                their_scaler.step(made)
        their_scaler.update()
        assert bool(stats.skipped) == (step in (8, 9))
        assert our_scaler.get_scale() == their_scaler.get_scale(), f"step {step}"
        training.near(ours, theirs, RELATIVE, when=f"step {step}")
    assert training.counted(clipper)[0] == 30


@pytest.mark.parametrize("optimizer", SOME)
def test_two_clippers_on_one_scaler(optimizer: str) -> None:
    """Each optimizer has its own norm, and skips by itself, as in torch."""
    ours, theirs = training.parameters(), training.parameters()
    our_two, their_two = (
        [training.optimizer(optimizer, part) for part in split(side)] for side in (ours, theirs)
    )
    our_scaler, their_scaler = make_scaler(), make_scaler()
    clippers = [GradClipper(part.items(), 3.0) for part in split(ours)]
    for step, grads in enumerate(training.stream(30, bad={8: math.inf, 9: math.nan})):
        if step == 9:
            grads["scale"].fill_(math.inf)
        backward(ours, grads, our_scaler)
        backward(theirs, grads, their_scaler)
        skipped = [
            bool(c.step(m, our_scaler).skipped) for c, m in zip(clippers, our_two, strict=True)
        ]
        our_scaler.update()
        for made, part in zip(their_two, split(theirs), strict=True):
            their_scaler.unscale_(made)
            torch.nn.utils.clip_grad_norm_(part.values(), 3.0)
            their_scaler.step(made)
        their_scaler.update()
        assert skipped == [step in (8, 9), step == 9]
        assert our_scaler.get_scale() == their_scaler.get_scale(), f"step {step}"
        training.near(ours, theirs, RELATIVE, when=f"step {step}")


def test_gradients_of_inference_mode_have_no_versions() -> None:
    """They are compared by what they are alone: no backward can add to them."""
    params, scaler = {"w": torch.nn.Parameter(torch.ones(3))}, make_scaler()
    made, clipper = torch.optim.SGD(params.values(), lr=1.0), GradClipper(params.items(), 1.0)
    scaler.scale(torch.zeros(()))
    with torch.inference_mode():
        params["w"].grad = torch.full((3,), 8192.0)
        clipper.clip_(made, scaler)
        assert clipper.clip_(made, scaler).total_norm.item() == pytest.approx(1.0, rel=1e-5)
        params["w"].grad = torch.full((3,), 8192.0)
        with pytest.raises(RuntimeError, match="have been written since"):
            clipper.clip_(made, scaler)
