"""What holds for any gradients, rule and policy, tried on random ones."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip import GradClipper, GradStats, rules
from fastclip.testing.variants import Variant
from tests import training
from tests.making import snapshot, unchanged

# A profile of its own, passed to each test: a loaded one would hold for other files too.
PROFILE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SLACK = 1 + 1e-6

# 1e-30 to 1e31, both signs, and zeros
values = st.builds(
    lambda zero, exponent, digits: 0.0 if zero else digits * 10.0**exponent,
    st.sampled_from([False, False, False, True]),
    st.one_of(st.just(0.0), st.floats(-30.0, 30.0)),
    st.one_of(st.floats(1.0, 9.0), st.floats(-9.0, -1.0)),
)
shapes = st.one_of(
    st.just(()), st.tuples(st.integers(0, 20)), st.tuples(st.integers(1, 4), st.integers(0, 5))
)


@st.composite
def gradients(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = tuple(DTYPES)) -> Tensor:
    """A few drawn values, repeated; float16 can hold eight times as much."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
    drawn, n = draw(st.lists(values, min_size=1, max_size=6)), math.prod(shape)
    made = torch.tensor((drawn * (n // len(drawn) + 1))[:n], dtype=torch.float64).reshape(shape)
    return made.clamp(-8e3, 8e3).to(dtype) if dtype == torch.float16 else made.to(dtype)


@st.composite
def runs(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = tuple(DTYPES)) -> list[list[Tensor]]:
    """A few steps of gradients of the same shapes and of changing size, some of them not finite."""
    first = draw(st.lists(gradients(dtypes), min_size=1, max_size=4))
    sizes = draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), max_size=5))
    steps = [[grad * size for grad in first] for size in [1.0, *sizes]]
    for grads in steps:
        full = [grad for grad in grads if grad.numel()]
        if full and draw(st.integers(0, 3)) == 0:
            bad = draw(st.sampled_from(range(len(full))))
            place = draw(st.integers(0, full[bad].numel() - 1))
            full[bad].view(-1)[place] = draw(st.sampled_from(training.BAD))
    return steps


thresholds = st.sampled_from([0.0, 1e-3, 1.0, 300.0])
scalar_rules = st.one_of(
    st.builds(rules.MaxNorm, thresholds),
    st.builds(rules.ZClip, warmup=st.integers(1, 2), z=st.just(0.5), max_norm=thresholds),
    st.builds(rules.LogZ, warmup=st.just(2), k=st.just(0.5), max_norm=thresholds),
    st.builds(rules.AutoClip, st.sampled_from([0.0, 50.0, 100.0]), st.integers(1, 4)),
)
any_rule: st.SearchStrategy[rules.Rule] = st.one_of(
    scalar_rules,
    st.builds(rules.AdaGC, warmup=st.integers(0, 2), max_norm=thresholds),
    st.builds(rules.AGC, st.sampled_from([0.01, 1.0])),
)


def finite(grads: Sequence[Tensor]) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads)


def allowed(threshold: float, grads: Sequence[Tensor]) -> float:
    """The threshold and 1e-6 of it; for the rounding of each element, half its spacing."""
    spacings = [
        torch.finfo(g.dtype).eps * g.double().abs().clamp(min=torch.finfo(g.dtype).smallest_normal)
        for g in grads
        if g.dtype in (torch.bfloat16, torch.float16)
    ]
    rounding = training.total(spacings) / 2 if spacings else 0.0
    # a threshold, and an element of float32, may be denormal: exact to half of 1.4e-45
    return threshold * SLACK + rounding + 1e-45 * math.sqrt(1 + sum(g.numel() for g in grads))


def within(rule: rules.Rule, stats: GradStats, params: Sequence[nn.Parameter]) -> None:
    """No norm is over its threshold."""
    grads = [p.grad for p in params if p.grad is not None]
    if isinstance(rule, rules.AGC):
        for parameter, grad in zip(params, grads, strict=True):
            units = zip(
                *((x.unbind() if x.dim() > 1 else [x]) for x in (parameter, grad)), strict=True
            )
            for weight, unit in units:
                limit = rule.clip_factor * max(training.total([weight]), rule.eps)
                assert training.total([unit]) <= allowed(limit, [unit])
    elif rule.per_tensor:
        for limit, grad in zip(stats.threshold.tolist(), grads, strict=True):
            assert training.total([grad]) <= allowed(limit, [grad])
    else:
        assert training.total(grads) <= allowed(stats.threshold.item(), grads)


class Watched:
    """A clipper, and what must be true after each of its steps."""

    def __init__(self, rule: rules.Rule, policy: Any, first: Sequence[Tensor]) -> None:
        self.rule, self.policy = rule, policy
        self.params = [nn.Parameter(torch.ones_like(grad)) for grad in first]
        self.clipper = GradClipper(self.params, rule=rule, nonfinite=policy)
        self.steps = self.clipped = self.skipped = self.consecutive = 0

    def clip_(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self.params, grads, strict=True):
            parameter.grad = grad.clone()
        state, good = training.rule_state(self.clipper), finite(grads)
        stats = None
        if self.policy == "error" and not good:
            with pytest.raises(RuntimeError, match="not finite"):
                self.clipper.clip_()
        else:
            stats = self.clipper.clip_()
            self.count(stats, skipped=self.policy == "skip" and not good)
        now = [parameter.grad for parameter in self.params]
        if not good and self.policy in ("skip", "error"):
            assert unchanged(now, snapshot(grads)), "a step that is not taken leaves the gradients"
            if self.steps > 1:
                training.same(training.rule_state(self.clipper), state)
        elif stats is not None and (good or self.policy == "zero"):
            assert finite([grad for grad in now if grad is not None])
            within(self.rule, stats, self.params)
            if good and not stats.clipped:
                assert unchanged(now, snapshot(grads)), "nothing was clipped"

    def count(self, stats: GradStats, skipped: bool) -> None:
        self.steps += 1
        self.skipped += skipped
        self.consecutive = (self.consecutive + 1) * skipped
        self.clipped += bool(stats.clipped)
        assert bool(stats.skipped) == skipped
        assert not (stats.skipped and stats.clipped)
        expected = (self.steps, self.clipped, self.skipped, self.consecutive)
        assert training.counted(self.clipper) == expected


@PROFILE
@given(runs(), any_rule, st.sampled_from(training.POLICIES))
def test_no_norm_is_over_its_threshold(
    each_backend: Variant, steps: list[list[Tensor]], rule: rules.Rule, policy: str
) -> None:
    watched = Watched(rule, policy, steps[0])
    for grads in steps:
        watched.clip_(grads)
    state = training.rule_state(watched.clipper)["state"]
    assert not training.with_nonfinite(state)


@PROFILE
@given(runs(), any_rule)
def test_skipped_steps_leave_no_trace(
    each_backend: Variant, steps: list[list[Tensor]], rule: rules.Rule
) -> None:
    all_of_them, good_ones = (Watched(rule, "skip", steps[0]) for _ in "ab")
    for grads in steps:
        all_of_them.clip_(grads)
        if finite(grads):
            good_ones.clip_(grads)
    if good_ones.steps:
        states = (training.rule_state(x.clipper)["state"] for x in (all_of_them, good_ones))
        training.same(*states)


@PROFILE
@given(runs([torch.float32, torch.float64]), scalar_rules)
def test_a_fused_step_is_the_clipped_gradient(
    each_backend: Variant, steps: list[list[Tensor]], rule: rules.Rule
) -> None:
    """SGD with a learning rate of 1 from parameters of 0: they are the update."""
    watched = Watched(rule, "skip", steps[0])
    optimizer = torch.optim.SGD(watched.params, lr=1.0, fused=True)
    for grads in steps:
        for parameter, grad in zip(watched.params, grads, strict=True):
            parameter.detach().zero_()
            parameter.grad = grad.clone()
        stats = watched.clipper.step(optimizer)
        watched.count(stats, skipped=not finite(grads))
        for parameter, grad in zip(watched.params, grads, strict=True):
            update = -parameter.detach().double()
            expected = stats.coef.double() * grad.double() if finite(grads) else 0 * update
            torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-44)
        if finite(grads):
            updates = [parameter.detach() for parameter in watched.params]
            assert training.total(updates) <= allowed(stats.threshold.item(), updates)
