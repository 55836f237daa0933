"""A coefficient handed to the optimizer is never lost, whatever the optimizer is wrapped in.

Each test compares parameters after steps with torch's: clip, then step.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

import fastclip
from fastclip import GradClipper
from tests import training
from tests.training import FUSED, Parameters

MAX_NORM = 5.0


class Forwarding:
    """Not an Optimizer: hands on what it does not know, attributes that are read too."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> None:
        self.inner.step()


class Accelerated(Optimizer):
    """An Optimizer around another one, with its groups and state."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Loop:
    """Has a step that is the inner optimizer's, as a training framework may mix in."""

    inner: Optimizer

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def dynamic(inner: Optimizer) -> Any:
    """An instance of a class made on the spot, under the inner one's class, with its attributes
    (`_step_supports_amp_scaling` among them) but a step of its own."""
    made: Any = object.__new__(type(f"Wrapped{type(inner).__name__}", (Loop, type(inner)), {}))
    made.__dict__.update(inner.__dict__)
    made.inner = inner
    return made


def scheduled(inner: Optimizer) -> Optimizer:
    """With its step replaced on the instance, which the scheduler does to count calls."""
    torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    return inner


def patched(inner: Any) -> Any:
    """With a step on the instance that calls another optimizer."""
    other = type(inner)(inner.param_groups)
    inner.step = types.MethodType(lambda self, closure=None: other.step(closure), inner)
    return inner


class Named:
    """A step that bears the inner one's name and docstring, which `wraps` gives it, and no more."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.step = functools.wraps(inner.step)(lambda closure=None: inner.step(closure))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def hooked(inner: Optimizer) -> Optimizer:
    inner.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    inner.register_step_post_hook(lambda optimizer, args, kwargs: None)
    return inner


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda inner: inner,
    "forwarding": Forwarding,
    "accelerated": Accelerated,
    "dynamic-subclass": dynamic,
    "twice": lambda inner: Accelerated(dynamic(inner)),
    "scheduled": scheduled,
    "patched": patched,
    "hooked": hooked,
    "wraps": Named,
}


def follow(ours: Parameters, step: Callable[[], Any], name: str) -> list[Any]:
    """20 steps beside torch's."""
    theirs = training.parameters()
    their_optimizer = training.optimizer(name.replace("fused", "foreach"), theirs)
    results = []
    for number, grads in enumerate(training.stream(20, bad={0: math.nan, 7: math.inf})):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        results.append(step())
        if number not in (0, 7):
            torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
            their_optimizer.step()
        training.near(ours, theirs, 1e-6, when=f"after step {number}")
    return results


def with_scaler(ours: Parameters, made: Any, clipper: GradClipper) -> Callable[[], Any]:
    """The step of gradients that are scaled first."""
    scaler = training.make_scaler()

    def step() -> Any:
        for parameter in ours.values():
            assert parameter.grad is not None
            parameter.grad *= scaler.scale(torch.ones(()))
        stats = clipper.step(made, scaler)
        scaler.update()
        return stats

    return step


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("optimizer", ["adam-fused", "momentum-fused", "adagrad-fused"])
def test_wrapped(optimizer: str, wrapper: str) -> None:
    ours = training.parameters()
    made = WRAPPERS[wrapper](training.optimizer(optimizer, ours))
    clipper = training.clipper(ours)
    stats = follow(ours, lambda: clipper.step(made), optimizer)
    assert [number for number, s in enumerate(stats) if s.skipped] == [0, 7]
    assert training.counted(clipper)[::2] == (20, 2)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "none"])
@pytest.mark.parametrize("optimizer", ["adam-fused", "momentum-fused"])
def test_wrapped_with_a_scaler(optimizer: str, wrapper: str) -> None:
    ours = training.parameters()
    made = WRAPPERS[wrapper](training.optimizer(optimizer, ours))
    stats = follow(ours, with_scaler(ours, made, training.clipper(ours)), optimizer)
    assert [number for number, s in enumerate(stats) if s.skipped] == [0, 7]


class Rescaling(Adam):
    """A subclass that does something to the gradients of its own before it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.5, 0.5)
        return super().step(closure)


class Documented(torch.optim.SGD):
    """A step of its own with the docstring of SGD's."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad)


def test_a_subclass_that_wraps_the_step_it_replaces() -> None:
    ours = training.parameters()
    values = list(ours.values())
    groups: list[dict[str, Any]] = [{"params": values[:1], "lr": 0.02}, {"params": values[1:]}]
    made, clipper = Documented(groups, lr=0.01, fused=True), training.clipper(ours)
    follow(ours, lambda: clipper.step(made), "sgd-fused")


@pytest.mark.parametrize("fused", [False, True])
def test_a_subclass_that_reads_its_gradients_finds_them_clipped(fused: bool) -> None:
    ours, theirs = training.parameters(), training.parameters()
    made = [Rescaling(side.values(), lr=0.01, fused=fused) for side in (ours, theirs)]
    clipper = training.clipper(ours)
    for grads in training.stream(20):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clipper.step(made[0])
        torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
        made[1].step()
    training.near(ours, theirs, 1e-6)


class Declared(Optimizer):
    """Plain SGD that declares what fused optimizers honour, and writes down what it was given."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.given: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.given.append((self.grad_scale, self.found_inf))
        for group in self.param_groups:
            for parameter in group["params"]:
                update = group["lr"] * parameter.grad / self.grad_scale
                parameter.sub_(torch.where(self.found_inf == 1, 0.0, update))


def test_a_class_that_declares_support_is_handed_the_coefficient() -> None:
    ours = training.parameters()
    groups = [{"params": [p], "lr": 0.02 if i == 0 else 0.01} for i, p in enumerate(ours.values())]
    made, clipper = Declared(groups), training.clipper(ours)
    before: list[Any] = []

    def step() -> Any:
        before.append(training.gradients(ours))
        stats = clipper.step(made)
        training.same(training.gradients(ours), before[-1], when="no rescale pass")
        assert not hasattr(made, "grad_scale")
        assert not hasattr(made, "found_inf")
        return stats

    stats = follow(ours, step, "sgd-fused")
    for one, (scale, found) in zip(stats, made.given, strict=True):
        assert (scale.dtype, scale.shape) == (torch.float32, ())
        assert found.item() == one.found_inf.item()
        if not found:
            assert scale.item() == pytest.approx(1 / one.coef.item(), rel=1e-6)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_mixed_groups_are_not_handed_it(scaled: bool) -> None:
    """A foreach group beside a fused one: torch raises on the attributes there."""
    ours = training.parameters()
    first, *rest = ours.values()
    groups = [
        {"params": [first], "lr": 0.02, "fused": True},
        {"params": rest, "foreach": True},
    ]
    made, clipper = Adam(groups, lr=0.01), training.clipper(ours)
    step = with_scaler(ours, made, clipper) if scaled else (lambda: clipper.step(made))
    stats = follow(ours, step, "adam-fused")
    assert [number for number, s in enumerate(stats) if s.skipped] == [0, 7]


def test_a_group_that_is_added_later() -> None:
    ours, theirs = training.parameters(), training.parameters()
    made = []
    for side in (ours, theirs):
        made.append(Adam([p for name, p in side.items() if name != "scale"], lr=0.01, fused=True))
    clipper = training.clipper(ours)
    for step, grads in enumerate(training.stream(20)):
        if step == 8:
            for one, side in zip(made, (ours, theirs), strict=True):
                one.add_param_group({"params": [side["scale"]], "fused": False, "foreach": True})
        training.assign(ours, grads)
        training.assign(theirs, grads)
        clipper.step(made[0])
        torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
        made[1].step()
        training.near(ours, theirs, 1e-6, when=f"after step {step}")


@pytest.mark.parametrize("with_found_inf", [False, True])
@pytest.mark.parametrize("outside", [False, True], ids=["all", "some-outside"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_the_users_own_grad_scale(optimizer: str, outside: bool, with_found_inf: bool) -> None:
    """The gradients are divided by the product, and the attributes are put back."""
    ours, theirs = training.parameters(), training.parameters()
    our_optimizer, their_optimizer = (training.optimizer(optimizer, s) for s in (ours, theirs))
    names = list(ours)[: 2 if outside else 4]
    clipper = GradClipper({name: ours[name] for name in names}.items(), MAX_NORM)
    own, flag = torch.tensor(4.0), torch.tensor(0.0)
    for grads in training.stream(10):
        training.assign(ours, grads)
        training.assign(theirs, grads)
        our_optimizer.grad_scale = their_optimizer.grad_scale = own  # type: ignore[attr-defined]
        if with_found_inf:
            our_optimizer.found_inf = flag  # type: ignore[attr-defined]
        clipper.step(our_optimizer)
        assert our_optimizer.grad_scale is own  # type: ignore[attr-defined]
        assert getattr(our_optimizer, "found_inf", None) is (flag if with_found_inf else None)
        torch.nn.utils.clip_grad_norm_([theirs[name] for name in names], MAX_NORM)
        their_optimizer.step()
    assert own.item() == 4.0
    training.near(ours, theirs, 1e-6)


@pytest.mark.parametrize("optimizer", ["adam-fused", "adagrad-fused"])
@pytest.mark.parametrize("bad", [False, True])
def test_the_users_own_found_inf(optimizer: str, bad: bool) -> None:
    """1 also where the gradients are not finite: a sum of 2 would not skip."""
    params = training.parameters()
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params)
    first, second = training.stream(2, bad={1: math.nan} if bad else {})
    training.assign(params, first)
    clipper.step(made)
    before = training.snapshot([training.values(params), made.state_dict()["state"]])
    training.assign(params, second)
    flag = torch.tensor(1.0)
    made.found_inf = flag  # type: ignore[attr-defined]
    clipper.step(made)
    assert made.found_inf is flag  # type: ignore[attr-defined]
    assert flag.item() == 1.0
    training.same([training.values(params), made.state_dict()["state"]], before)


@pytest.mark.parametrize("own", [False, True])
def test_attributes_are_put_back_when_the_step_raises(own: bool) -> None:
    params = training.parameters()
    made: Any = training.optimizer("adam-fused", params)
    scale = torch.tensor(2.0)
    if own:
        made.grad_scale = scale

    def fail(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise ZeroDivisionError("from a hook")

    made.register_step_pre_hook(fail)
    training.assign(params, training.stream(1)[0])
    with pytest.raises(ZeroDivisionError, match="from a hook"):
        training.clipper(params).step(made)
    assert vars(made).get("grad_scale") is (scale if own else None)
    assert "found_inf" not in vars(made)


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_the_optimizer_steps_once(mode: str) -> None:
    params = training.parameters()
    made = training.optimizer(f"adam-{mode}", params)
    calls: list[None] = []
    made.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(None))
    clipper = training.clipper(params)
    for number, grads in enumerate(training.stream(4)):
        training.assign(params, grads)
        clipper.step(made)
        assert len(calls) == number + 1
    training.assign(params, training.stream(1, bad={0: math.nan})[0])
    clipper.step(made)
    assert len(calls) == (4 if mode == "foreach" else 5)  # a fused one skips by itself
    assert fastclip.grad_stats(params.items()).found_inf.item() == 1.0
