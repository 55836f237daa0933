"""Which optimizers are handed the coefficient, and what they are handed."""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastclip import GradClipper, folding
from fastclip.gradients import of_parameters, sort_out
from fastclip.policy import POLICIES, Policy
from fastclip.rules import AGC, AdaGC, Rule
from tests.making import floats


def parameters(*grads: Tensor | None) -> list[Tensor]:
    """Zeros with memory of their own, to be written by optimizers."""
    made: list[Tensor] = []
    for grad in grads:
        shape, dtype = ((1,), None) if grad is None else (grad.shape, grad.dtype)
        made.append(torch.zeros(shape, dtype=dtype, requires_grad=True))
        made[-1].grad = grad
    return made


def two() -> list[Tensor]:
    return parameters(floats(3.0, 4.0), floats(0.0))


class Declared(Optimizer):
    """SGD with a rate of 1 that honours both attributes and writes them down."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.given: list[tuple[Any, Any]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale, found = vars(self).get("grad_scale"), vars(self).get("found_inf")
        self.given.append((scale, found))
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update = p.grad if scale is None else p.grad / scale
                p -= update if found is None else torch.where(found == 1, 0.0, update)


class Inherits(Declared):
    pass


class Overrides(Declared):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class OverridesAndDeclares(Overrides):
    _step_supports_amp_scaling = True


class Revokes(Declared):
    _step_supports_amp_scaling = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class AsksTheScaler(Declared):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class SaysSoOfItself(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self._step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class Subclass(AdamW):
    pass


class Mixin:
    """What a framework mixes in in front of an optimizer's class."""

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class Forwards:
    """Has no step: hands on the inner optimizer's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def scheduled(inner: Any) -> Any:
    torch.optim.lr_scheduler.StepLR(inner, 1)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    return inner


def mixed_in(inner: Any) -> Any:
    """Made without a constructor, with all attributes of the inner one."""
    made: Any = object.__new__(type("Mixed", (Mixin, type(inner)), {}))
    vars(made).update(vars(inner))
    return made


def copied(inner: Any) -> Any:
    """Of the same class, with all attributes; a scheduled step still belongs to the inner one."""
    made = object.__new__(type(inner))
    vars(made).update(vars(inner))
    return made


def decorated(inner: Any) -> Any:
    step = functools.wraps(inner.step)(lambda self, closure=None: None)
    inner.step = types.MethodType(step, inner)
    return inner


MADE: dict[str, tuple[Callable[[], Any], bool]] = {
    "adam": (lambda: Adam(two(), fused=True), True),
    "adamw": (lambda: AdamW(two(), fused=True), True),
    "sgd": (lambda: SGD(two(), fused=True), True),
    "adagrad": (lambda: Adagrad(two(), fused=True), True),
    "foreach": (lambda: Adam(two(), foreach=True), False),
    "default": (lambda: SGD(two()), False),
    "not-fusible": (lambda: torch.optim.RMSprop(two()), False),
    "mixed-groups": (
        lambda: Adam([{"params": two(), "fused": True}, {"params": two(), "fused": False}]),
        False,
    ),
    "subclass": (lambda: Subclass(two(), fused=True), True),
    "mixed-in": (lambda: mixed_in(AdamW(two(), fused=True)), False),
    "scheduled": (lambda: scheduled(AdamW(two(), fused=True)), True),
    "copied": (lambda: copied(AdamW(two(), fused=True)), True),
    "copied-scheduled": (lambda: copied(scheduled(AdamW(two(), fused=True))), False),
    "decorated": (lambda: decorated(AdamW(two(), fused=True)), False),
    "decorated-scheduled": (lambda: scheduled(decorated(AdamW(two(), fused=True))), False),
    "forwards": (lambda: Forwards(AdamW(two(), fused=True)), False),
    "declared": (lambda: Declared(two()), True),
    "declared-inherited": (lambda: Inherits(two()), True),
    "declared-overridden": (lambda: Overrides(two()), False),
    "declared-again": (lambda: OverridesAndDeclares(two()), True),
    "declared-revoked": (lambda: Revokes(two()), False),
    "declared-mixed-in": (lambda: mixed_in(Declared(two())), False),
    "declared-old-contract": (lambda: AsksTheScaler(two()), False),
    "declared-by-instance": (lambda: SaysSoOfItself(two()), False),
}


@pytest.mark.parametrize(("make", "expected"), MADE.values(), ids=MADE.keys())
def test_who_honours_the_attributes(make: Callable[[], Any], expected: bool) -> None:
    assert folding.honours(make()) is expected


def handed(
    params: list[Tensor],
    optimized: list[Tensor],
    rule: Rule | None = None,
    policy: Policy = "skip",
) -> Any:
    """What `Declared` was handed for a grad_scale."""
    optimizer = Declared(optimized)
    GradClipper(params, None if rule else 1.0, rule=rule, nonfinite=policy).step(optimizer)
    ((scale, found),) = optimizer.given
    assert found.item() == 0.0
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    return scale


@pytest.mark.parametrize("policy", POLICIES)
def test_a_single_coefficient_is_handed(policy: Policy) -> None:
    params = two()
    scale = handed(params, params[::-1], policy=policy)
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert scale.item() == pytest.approx(5.0 + 1e-6, rel=1e-7)
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [3.0, 4.0]  # not rescaled
    assert params[0].tolist() == pytest.approx([-0.6, -0.8])


def test_parameters_without_gradients_do_not_matter() -> None:
    without, *params = parameters(None, floats(3.0, 4.0))
    assert handed([*params, without], params) is not None
    assert handed(params, [*params, without]) is not None


def sharing() -> list[Tensor]:
    first, second = parameters(floats(3.0, 4.0), floats(0.0, 0.0))
    second.grad = first.grad
    return [first, second]


NOT_HANDED: dict[str, Callable[[], Any]] = {
    "one-outside-the-clipper": lambda: ((ps := two())[:1], ps),
    "one-outside-the-optimizer": lambda: ((ps := two()), ps[:1]),
    "float64": lambda: ((ps := parameters(floats(3.0, 4.0, dtype=torch.float64))), ps),
    "shared-gradient": lambda: ((ps := sharing()), ps),
    "adagc": lambda: ((ps := two()), ps, AdaGC()),
    "agc": lambda: ((ps := two()), ps, AGC()),
}


@pytest.mark.parametrize("case", NOT_HANDED.values(), ids=NOT_HANDED.keys())
def test_others_are_rescaled_in_place(case: Callable[[], Any]) -> None:
    params, optimized, *rule = case()
    assert handed(params, optimized, *rule) is None
    norms = [p.grad.double().norm().item() for p in params]
    assert max(norms) <= 1.0


def test_nothing_to_hand_is_a_plain_step() -> None:
    params = two()
    optimizer = Declared(params)
    GradClipper(params, rule=AdaGC(), nonfinite="propagate").step(optimizer)
    assert optimizer.given == [(None, None)]


def test_suits_only_gradients_that_are_rows_of_their_own() -> None:
    plain, shared = of_parameters(two()), of_parameters(sharing())
    expanded = of_parameters(parameters(floats(1.0).expand(3)))
    assert folding.suits(sort_out(plain), plain)
    assert not folding.suits(sort_out(shared), shared)
    assert not folding.suits(sort_out(expanded), expanded)


@given(st.floats(min_value=0.0, max_value=2.0**20, allow_subnormal=True))
def test_split_gives_the_factor_to_float32(value: float) -> None:
    factor = torch.tensor(value, dtype=torch.float64)
    rest, grad_scale = folding.split(factor)
    assert grad_scale.isfinite()
    assert (rest.item() == 1.0) == (value >= folding.SMALLEST)
    assert (rest / grad_scale.double()).item() == pytest.approx(value, rel=1e-7)


def test_split_keeps_nan() -> None:
    rest, grad_scale = folding.split(torch.tensor(math.nan, dtype=torch.float64))
    assert rest.isnan()
    assert grad_scale.isnan()


@pytest.mark.parametrize("max_norm", [0.0, 1e-20, 1.0], ids=str)
@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad])
def test_coefficients_beyond_float32(kind: Any, max_norm: float) -> None:
    """Of finite gradients whose norm, 4e38, is beyond float32: 1 / coef would be infinite."""
    values = torch.tensor([1.0, -2.0] * 8) * 1e38
    ours, theirs = (parameters(values.clone()) for _ in range(2))
    stats = GradClipper(ours, max_norm).step(kind(ours, lr=0.1, fused=True))
    coef = max_norm / values.double().norm().item()
    assert (stats.total_norm.item(), stats.found_inf.item()) == (math.inf, 0.0)
    theirs[0].grad = (values.double() * coef).float()
    kind(theirs, lr=0.1).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_zeros_stand_for_a_missing_momentum() -> None:
    params = parameters(floats(3.0, 4.0), None, floats(1.0))
    optimizer = SGD(params, momentum=0.9, fused=True)
    optimizer.state[params[2]]["momentum_buffer"] = floats(7.0)
    assert folding.ready_to_skip(optimizer)
    buffers = [optimizer.state[p].get("momentum_buffer") for p in params]
    assert [None if b is None else b.tolist() for b in buffers] == [[0.0, 0.0], None, [7.0]]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: SGD(ps, momentum=0.9, foreach=True),
        lambda ps: SGD(ps, fused=True),
        lambda ps: Adam(ps, fused=True),
    ],
    ids=["foreach", "no-momentum", "adam"],
)
def test_no_momentum_is_made_up(optimizer: Callable[[list[Tensor]], Optimizer]) -> None:
    params = two()
    made = optimizer(params)
    assert folding.ready_to_skip(made)
    assert not any(made.state[p] for p in params)


def test_dampening_leaves_the_first_momentum_missing() -> None:
    """The first step is not dampened, which no momentum to start from can give."""
    (bad,) = params = parameters(floats(math.nan))
    optimizer = SGD(params, lr=1.0, momentum=0.9, dampening=0.5, fused=True)
    assert not folding.ready_to_skip(optimizer)
    clipper = GradClipper(params, 1.0)
    assert clipper.step(optimizer).skipped
    assert not optimizer.state[bad]
    bad.grad = floats(0.5)
    clipper.step(optimizer)
    assert bad.item() == -0.5
    assert folding.ready_to_skip(optimizer)
    bad.grad = floats(math.nan)
    assert clipper.step(optimizer).skipped
    assert optimizer.state[bad]["momentum_buffer"].item() == 0.5


OWN = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}


@pytest.mark.parametrize("own", [{}, OWN], ids=["none", "users"])
@pytest.mark.parametrize("restore", [True, False])
def test_handed_attributes_come_and_go(own: dict[str, Tensor], restore: bool) -> None:
    optimizer: Any = SGD(two(), fused=True)
    vars(optimizer).update(own)
    with folding.handed(optimizer, torch.tensor(2.0), torch.tensor(1.0), restore):
        assert optimizer.grad_scale.item() == (8.0 if own else 2.0)
        assert optimizer.found_inf.item() == 1.0
    left = {name: vars(optimizer)[name] for name in OWN if name in vars(optimizer)}
    assert left == (own if restore else {})


@pytest.mark.parametrize("own", [{}, OWN], ids=["none", "users"])
def test_the_users_attributes_come_back_after_an_error(own: dict[str, Tensor]) -> None:
    params = two()
    optimizer: Any = SGD(params, fused=True)
    vars(optimizer).update(own)
    clipper = GradClipper(params)

    def fail(*_: object) -> None:
        assert optimizer.grad_scale.item() == pytest.approx(20.0 if own else 5.0)
        raise OSError("of the hook")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="of the hook"):
        clipper.step(optimizer)
    left = {name: vars(optimizer)[name] for name in OWN if name in vars(optimizer)}
    assert left == own
    assert clipper.counters()["steps"] == 1


@pytest.mark.parametrize("kind", [Adam, SGD, Adagrad])
def test_a_coefficient_of_1_is_not_handed_to_torch_on_the_cpu(kind: Any) -> None:
    """Its kernels write gradients back when they have divided them."""
    params = two()
    optimizer, given = kind(params, fused=True), []
    optimizer.register_step_pre_hook(lambda o, *_: given.append((o.grad_scale, o.found_inf.item())))
    clipper = GradClipper(params, 5.0)
    for grad in (floats(3.0, 3.9), floats(6.0, 8.0)):
        params[0].grad = grad
        clipper.step(optimizer)
    assert given[0] == (None, 0.0)
    assert given[1][0].item() == pytest.approx(2.0)


def test_a_class_of_ones_own_is_always_handed_it() -> None:
    optimizer = Declared(two())
    GradClipper(optimizer.param_groups[0]["params"], 9.0).step(optimizer)
    assert optimizer.given[0][0].item() == 1.0
