"""What of torch.amp.GradScaler is private and used, and what a clipper leaves in it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, AdamW, Optimizer

from fastclip import GradClipper, scaling
from tests.making import floats, parameters

SCALE = 8.0


def scaler(**options: Any) -> GradScaler:
    """One that has scaled a loss."""
    made = GradScaler("cpu", init_scale=SCALE, growth_interval=100, **options)
    made.scale(torch.ones(()))
    return made


def scaled(*grads: Tensor) -> list[Tensor]:
    return parameters(*(grad * SCALE for grad in grads))


def sgd(params: list[Tensor], **options: Any) -> Optimizer:
    values = [torch.zeros_like(p).requires_grad_() for p in params]  # making's share memory
    for value, p in zip(values, params, strict=True):
        value.grad = p.grad
    return SGD(values, lr=1.0, **options)


def clipped_by(optimizer: Optimizer, max_norm: float = 1.0, **options: Any) -> GradClipper:
    return GradClipper(optimizer.param_groups[0]["params"], max_norm, **options)


def grads(optimizer: Optimizer) -> list[list[float]]:
    return [p.grad.tolist() for p in optimizer.param_groups[0]["params"]]


def test_the_private_names_of_torch() -> None:
    """All that is used of them, as torch has them; a change of theirs is to fail here."""
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0)))
    assert made._scale is not None
    assert (made._scale.dtype, made._scale.shape) == (torch.float32, ())
    assert made._scale.item() == SCALE
    assert GradScaler("cpu")._scale is None
    assert [stage.name for stage in OptState] == ["READY", "UNSCALED", "STEPPED"]
    assert dict(made._per_optimizer_states) == {}
    before = made._per_optimizer_states[id(optimizer)]
    assert before == {"stage": OptState.READY, "found_inf_per_device": {}}
    made.unscale_(optimizer)
    after = made._per_optimizer_states[id(optimizer)]
    assert after["stage"] is OptState.UNSCALED
    ((device, flag),) = after["found_inf_per_device"].items()
    assert (device, flag.dtype, flag.shape) == (torch.device("cpu"), torch.float32, ())
    made.step(optimizer)
    assert made._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    made.update()
    assert dict(made._per_optimizer_states) == {}


@pytest.mark.parametrize("value", [4.0, math.nan, math.inf])
def test_a_clip_leaves_the_scaler_as_unscale_does(value: float) -> None:
    states = []
    for clips in (True, False):
        made, optimizer = scaler(), sgd(scaled(floats(3.0, value)))
        if clips:
            clipped_by(optimizer).clip_(optimizer, made)
        else:
            made.unscale_(optimizer)
        state = made._per_optimizer_states[id(optimizer)]
        states.append({key: state[key] for key in ("stage", "found_inf_per_device")})
    assert states[0] == states[1]


def test_the_flags_are_nobody_elses() -> None:
    """update() adds to them in place."""
    made = scaler()
    first, second = (sgd(scaled(floats(math.inf))) for _ in range(2))
    params = [group["params"][0] for each in (first, second) for group in each.param_groups]
    clipper = GradClipper(params, 1.0)
    stats = clipper.clip_([first, second], made)
    made.step(first)
    made.step(second)
    made.update()
    assert stats.found_inf.item() == 1.0
    assert made.get_scale() == SCALE / 2
    assert [p.item() for p in params] == [0.0, 0.0]


def test_one_norm_of_several_optimizers() -> None:
    made = scaler()
    first, second = sgd(scaled(floats(3.0))), sgd(scaled(floats(4.0)))
    params = [group["params"][0] for each in (first, second) for group in each.param_groups]
    stats = GradClipper(params, 1.0).clip_([first, second], made)
    assert stats.total_norm.item() == 5.0
    assert [p.grad.item() for p in params] == pytest.approx([0.6, 0.8])
    made.step(first)
    made.step(second)
    made.update()
    assert [p.item() for p in params] == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize("policy", ["skip", "propagate"])
@pytest.mark.parametrize("other", [1.0, math.nan], ids=["finite", "nan"])
def test_gradients_outside_the_clipper(other: float, policy: str) -> None:
    """They are unscaled and checked, and neither measured nor clipped."""
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0), floats(other, 6.0)))
    inside, outside = optimizer.param_groups[0]["params"]
    stats = GradClipper([inside], 1.0, nonfinite=policy).clip_(optimizer, made)  # type: ignore[arg-type]
    assert stats.names == ("0",)
    assert stats.nonfinite_count.item() == 0
    assert (stats.found_inf.item() == 1.0) is stats.skipped.item() is math.isnan(other)
    if math.isnan(other) and policy == "skip":
        expected = [[24.0, 32.0], [math.nan, 48.0]]
    else:
        expected = [[0.6, 0.8], [other, 6.0]]
    for got, want in zip((inside.grad, outside.grad), expected, strict=True):
        assert got.tolist() == pytest.approx(want, nan_ok=True)
    made.step(optimizer)
    made.update()
    assert made.get_scale() == (SCALE / 2 if math.isnan(other) else SCALE)


def test_an_error_names_what_it_can_and_changes_nothing() -> None:
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0), floats(math.nan)))
    inside = optimizer.param_groups[0]["params"][0]
    clipper = GradClipper([("w", inside)], 1.0, nonfinite="error")
    with pytest.raises(RuntimeError, match="one of the optimizer that is not the clipper's"):
        clipper.clip_(optimizer, made)
    inside.grad[0] = math.inf
    with pytest.raises(RuntimeError, match=r"gradient 'w' \(0 NaN, 1 inf\)"):
        clipper.clip_(optimizer, made)
    assert inside.grad.tolist() == [math.inf, 32.0]
    assert dict(made._per_optimizer_states) == {}
    assert clipper.counters()["steps"] == 0


@pytest.mark.parametrize("flagged", [False, True])
def test_gradients_that_the_user_has_unscaled(flagged: bool) -> None:
    """The scaler's flag counts, also where what it was set for is gone."""
    made, optimizer = scaler(), sgd(scaled(floats(3.0, math.inf if flagged else 4.0)))
    made.unscale_(optimizer)
    for p in optimizer.param_groups[0]["params"]:
        p.grad.nan_to_num_(posinf=4.0)
    stats = clipped_by(optimizer).step(optimizer, made)
    made.update()
    assert stats.total_norm.item() == 5.0
    assert (stats.skipped.item(), stats.found_inf.item()) == (flagged, float(flagged))
    assert grads(optimizer) == [[3.0, 4.0] if flagged else pytest.approx([0.6, 0.8])]
    assert made.get_scale() == (SCALE / 2 if flagged else SCALE)


def test_what_the_user_has_spoiled_after_unscaling_is_skipped_too() -> None:
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0)))
    made.unscale_(optimizer)
    (p,) = optimizer.param_groups[0]["params"]
    p.grad[0] = math.nan
    assert clipped_by(optimizer).step(optimizer, made).skipped
    assert p.tolist() == [0.0, 0.0]


class Swallows(Optimizer):
    """Has taken over the inner optimizer's attributes, and loses what it is handed."""

    def __init__(self, inner: Optimizer) -> None:
        vars(self).update(vars(inner))
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("value", [4.0, math.inf])
def test_a_flag_is_not_lost_in_a_wrapper(value: float) -> None:
    made, inner = scaler(), sgd(scaled(floats(3.0, value)), fused=True)
    optimizer = Swallows(inner)
    assert scaling.claims_flags(optimizer)
    (p,) = optimizer.param_groups[0]["params"]
    stats = clipped_by(optimizer).step(optimizer, made)
    assert stats.skipped.item() is math.isinf(value)
    assert p.tolist() == ([0.0, 0.0] if math.isinf(value) else pytest.approx([-0.6, -0.8]))
    with pytest.raises(RuntimeError, match="has already been called"):
        made.step(optimizer)
    made.update()
    assert made.get_scale() == (SCALE / 2 if math.isinf(value) else SCALE)


def test_groups_that_are_fused_no_more() -> None:
    """Loading a state can change that; torch's scaler then raises."""
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0)), fused=True)
    optimizer.param_groups[0]["fused"] = False
    clipped_by(optimizer).step(optimizer, made)
    (p,) = optimizer.param_groups[0]["params"]
    assert p.tolist() == pytest.approx([-0.6, -0.8])


def test_groups_that_are_fused_only_now() -> None:
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0)))
    optimizer.param_groups[0]["fused"] = True
    clipped_by(optimizer).step(optimizer, made)
    (p,) = optimizer.param_groups[0]["params"]
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_the_first_momentum_of_a_skipped_step_is_zero() -> None:
    """torch's own scaler leaves whatever was in the memory."""
    made, optimizer = scaler(), sgd(scaled(floats(math.nan)), fused=True, momentum=0.9)
    (p,) = optimizer.param_groups[0]["params"]
    clipped_by(optimizer).clip_(optimizer, made)
    made.step(optimizer)
    made.update()
    assert optimizer.state[p]["momentum_buffer"].item() == 0.0


def test_dampening_is_looked_after_with_a_scaler_too() -> None:
    made = scaler()
    optimizer = sgd(scaled(floats(math.nan)), fused=True, momentum=0.9, dampening=0.5)
    (p,) = optimizer.param_groups[0]["params"]
    clipper = clipped_by(optimizer)
    assert clipper.step(optimizer, made).skipped
    assert not optimizer.state[p]
    with pytest.raises(RuntimeError, match="too late to clip"):
        clipper.step(optimizer, made)
    made.update()
    assert made.get_scale() == SCALE / 2
    p.grad = floats(0.5) * SCALE / 2
    clipper.step(optimizer, made)
    assert p.item() == -0.5


def test_the_users_grad_scale_goes_as_torch_has_it() -> None:
    """After scaler.step it is gone: the user sets it before each."""
    made, optimizer = scaler(), sgd(scaled(floats(3.0, 4.0)), fused=True)
    vars(optimizer)["grad_scale"] = torch.tensor(2.0)
    clipped_by(optimizer).step(optimizer, made)
    (p,) = optimizer.param_groups[0]["params"]
    assert p.tolist() == pytest.approx([-0.3, -0.4])
    assert "grad_scale" not in vars(optimizer)


class Sharded(GradScaler):
    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)


def with_sharded() -> None:
    made, optimizer = Sharded("cpu"), sgd(scaled(floats(1.0)))
    made.scale(torch.ones(()))
    clipped_by(optimizer).clip_(optimizer, made)


def with_some_unscaled() -> None:
    made, first, second = scaler(), sgd(scaled(floats(1.0))), sgd(scaled(floats(1.0)))
    made.unscale_(first)
    clipped_by(first).clip_([first, second], made)


def with_one_of_none() -> None:
    made, optimizer = scaler(), sgd(scaled(floats(1.0)))
    stray = torch.zeros(1, requires_grad=True)
    stray.grad = floats(1.0)
    pairs = [("w", optimizer.param_groups[0]["params"][0]), ("stray", stray)]
    GradClipper(pairs, 1.0).clip_(optimizer, made)


def call(optimizer: Any, made: Any, **options: Any) -> None:
    own = sgd(scaled(floats(1.0)))
    clipped_by(own, **options).clip_(own if optimizer is ... else optimizer, made)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no-scaler": (lambda: call(..., "fp16"), TypeError, "must be a torch.amp.GradScaler, got str"),
    "no-optimizer": (lambda: call(None, scaler()), TypeError, "needs the optimizer"),
    "no-optimizer-disabled": (
        lambda: call(None, GradScaler("cpu", enabled=False)),
        TypeError,
        "needs the optimizer",
    ),
    "not-an-optimizer": (lambda: call([3], scaler()), TypeError, "or several, got int"),
    "zero": (lambda: call(..., scaler(), nonfinite="zero"), ValueError, 'use "skip"'),
    "nothing-scaled": (
        lambda: call(..., GradScaler("cpu")),
        RuntimeError,
        r"not scaled a loss yet: the order is scaler.scale\(loss\)",
    ),
    "own-unscale": (with_sharded, TypeError, "Sharded has an unscale_ of its own"),
    "some-unscaled": (with_some_unscaled, RuntimeError, "for all of them or for none"),
    "one-of-none": (with_one_of_none, ValueError, "gradient 'stray' is of no optimizer"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(wrong: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.parametrize("fused", [False, True])
def test_a_disabled_scaler_is_the_plain_path(fused: bool) -> None:
    made, optimizer = (
        GradScaler("cpu", enabled=False),
        sgd(parameters(floats(3.0, 4.0)), fused=fused),
    )
    stats = clipped_by(optimizer, nonfinite="zero").step(optimizer, made)
    made.update()
    (p,) = optimizer.param_groups[0]["params"]
    assert stats.total_norm.item() == 5.0
    assert p.tolist() == pytest.approx([-0.6, -0.8])


def test_no_gradients_under_a_scaler() -> None:
    made = scaler()
    p = torch.zeros(2, requires_grad=True)
    optimizer = AdamW([p])
    stats = GradClipper([p]).step(optimizer, made)
    made.update()
    assert (stats.names, stats.skipped.item(), stats.total_norm.item()) == ((), False, 0.0)
    assert made.get_scale() == SCALE
