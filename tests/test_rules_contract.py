"""What every rule keeps to: no waiting, a state that nothing spoils and that resumes, refusals."""

import inspect
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip import rules
from fastclip.rules import AGC, AdaGC, AutoClip, Decision, LogZ, MaxNorm, Rule, State, ZClip
from fastclip.testing.waiting import NoWaiting
from tests.stepping import CPU, RULES, log_normal, measured, run, run_rows

INF, NAN = math.inf, math.nan
aten = torch.ops.aten

each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "tensor": lambda x: x + torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING.keys())
def test_waiting_is_noticed(call: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        call(x)


@each_rule
@pytest.mark.parametrize("inv_scale", [None, 2.0**-16])
def test_no_rule_waits(rule: Rule, inv_scale: float | None) -> None:
    steps = [measured(row, step, inv_scale) for step, row in enumerate([[0.3, 0.1]] * 5)]
    steps += [measured([NAN, 1.0], 5, inv_scale), measured([100.0, 1.0], 6, inv_scale)]
    found = torch.tensor(True)
    with NoWaiting():
        state = rule.init(2, CPU)
        for step in steps:
            decision = rule.decide(step, state)
            state = decision.unless(found, state).state


@each_rule
def test_shapes_and_dtypes(rule: Rule) -> None:
    for n in (0, 1, 2):
        state = rule.init(n, CPU)
        decision = rule.decide(measured([0.5] * n), state)
        shape = (n,) if rule.per_tensor else ()
        for tensor in (decision.coef, decision.threshold):
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.float64, shape)
        assert decision.state.keys() == state.keys()
        for name, tensor in decision.state.items():
            assert tensor.dtype in (torch.float64, torch.int64)
            assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
            assert not rule.per_tensor or tensor.shape[0] == n


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each_rule
def test_decide_is_pure(rule: Rule) -> None:
    """Neither what was measured nor the state is written, and the same comes out again."""
    state = run_rows(rule, log_normal(8, 2))[-1].state
    at = measured([0.4, 30.0], 8)
    before, gradients = copied(state), [gradient.clone() for gradient in at.gradients]
    first, second = rule.decide(at, state), rule.decide(at, state)
    assert same(state, before)
    assert all(torch.equal(a, b) for a, b in zip(at.gradients, gradients, strict=True))
    assert torch.equal(first.coef, second.coef)
    assert torch.equal(first.threshold, second.threshold)
    assert same(first.state, second.state)


@each_rule
@pytest.mark.parametrize("position", range(7))
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_is_never_remembered(rule: Rule, position: int, bad: float) -> None:
    """The state stays bitwise, and what follows is as if the step had not been."""
    norms = log_normal(12, 2).tolist()
    clean = run_rows(rule, norms)
    state = clean[position - 1].state if position else rule.init(2, CPU)
    decision = rule.decide(measured([bad, bad], position), state)
    assert same(decision.state, state)
    for step in range(position, len(norms)):
        decision = rule.decide(measured(norms[step], step), decision.state)
        assert torch.equal(decision.coef, clean[step].coef)
        assert torch.equal(decision.threshold, clean[step].threshold)
        assert same(decision.state, clean[step].state)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_a_tensor_that_is_not_finite_does_not_spoil_the_others(
    bad: float, steps: int, max_norm: float | None
) -> None:
    rule = AdaGC(warmup=3, max_norm=max_norm)
    state = run_rows(rule, log_normal(steps, 2))[-1].state
    decision = rule.decide(measured([0.7, bad]), state)
    assert all(torch.equal(decision.state[name][1], state[name][1]) for name in state)
    # in warm-up with a cap the others' clipped norms are unknown: they came from the total
    known = steps >= 3 or max_norm is None
    assert decision.state["count"][0] == state["count"][0] + known
    assert decision.state["gamma"].isfinite().all()
    assert (decision.state["gamma"] > 0).all()


@each_rule
@pytest.mark.parametrize("cut", [1, 2, 5, 20])
def test_a_run_that_is_cut_and_resumed(rule: Rule, cut: int, tmp_path: Path) -> None:
    """torch.save and torch.load(weights_only=True) in between change no bit of what follows."""
    norms = log_normal(40, 2).tolist()
    whole = run_rows(rule, norms)
    torch.save(whole[cut - 1].state, tmp_path / "state.pt")
    state: State = torch.load(tmp_path / "state.pt", weights_only=True)
    for step, row in enumerate(norms[cut:], cut):
        decision = rule.decide(measured(row, step), state)
        assert torch.equal(decision.coef, whole[step].coef)
        assert torch.equal(decision.threshold, whole[step].threshold)
        assert same(decision.state, whole[step].state)
        state = decision.state


@each_rule
def test_a_decision_can_be_called_off(rule: Rule) -> None:
    state = run_rows(rule, log_normal(6, 2))[-1].state
    decision = rule.decide(measured([300.0, 5.0], 6), state)
    off = decision.unless(torch.tensor(True), state)
    assert torch.equal(off.coef, torch.ones_like(decision.coef))
    assert same(off.state, state)
    on = decision.unless(torch.tensor(False), state)
    assert torch.equal(on.coef, decision.coef)
    assert same(on.state, decision.state)
    if isinstance(rule, AGC):
        assert decision.units is not None
        assert off.units is not None
        assert on.units is not None
        for unit, unit_off, unit_on in zip(decision.units, off.units, on.units, strict=True):
            assert (unit < 1).any()
            assert torch.equal(unit_off, torch.ones_like(unit))
            assert torch.equal(unit_on, unit)


def no_size(*values: object) -> list[object]:
    return [*values, NAN, -1.0, -INF]


def not_finite(*values: object) -> list[object]:
    return no_size(INF, *values)


WRONG: dict[str, tuple[Callable[[Any], object], list[object]]] = {
    "max_norm of MaxNorm": (MaxNorm, no_size(-1e-300)),
    "max_norm of AdaGC": (lambda x: AdaGC(max_norm=x), no_size()),
    "max_norm of ZClip": (lambda x: ZClip(max_norm=x), no_size()),
    "max_norm of LogZ": (lambda x: LogZ(max_norm=x), no_size()),
    "max_norm of AutoClip": (lambda x: AutoClip(max_norm=x), no_size()),
    "clip_factor": (lambda x: AGC(clip_factor=x), not_finite(0.0)),
    "eps of AGC": (lambda x: AGC(eps=x), not_finite()),
    "ratio": (lambda x: AdaGC(ratio=x), not_finite(0.0)),
    "beta": (lambda x: AdaGC(beta=x), not_finite(1.0)),
    "warmup of AdaGC": (lambda x: AdaGC(warmup=x), [2**63, -1]),
    "eps of AdaGC": (lambda x: AdaGC(eps=x), not_finite()),
    "alpha": (lambda x: ZClip(alpha=x), not_finite(1.0, 1.5)),
    "z": (lambda x: ZClip(z=x), not_finite(0.0)),
    "warmup of ZClip": (lambda x: ZClip(warmup=x), [2**63, 0, -5]),
    "eps of ZClip": (lambda x: ZClip(eps=x), not_finite(0.0)),
    "k": (lambda x: LogZ(k=x), not_finite()),
    "halflife": (lambda x: LogZ(halflife=x), no_size(0.0)),
    "warmup of LogZ": (lambda x: LogZ(warmup=x), [2**63, 1, 0]),
    "percentile": (lambda x: AutoClip(percentile=x), not_finite(100.1)),
    "window": (lambda x: AutoClip(window=x), [0, -3]),
}


@pytest.mark.parametrize(
    ("what", "value"), [(what, value) for what, (_, values) in WRONG.items() for value in values]
)
def test_a_wrong_number(what: str, value: float) -> None:
    name = what.split()[0]
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {re.escape(str(value))}$"):
        WRONG[what][0](value)


@pytest.mark.parametrize("value", ["1.0", None, True, [1.0], torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("what", [what for what in WRONG if not what.startswith("max_norm")])
def test_what_is_not_a_number(what: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{what.split()[0]} must be a .*number.*, got"):
        WRONG[what][0](value)


@pytest.mark.parametrize("what", WRONG)
def test_a_number_beyond_float64(what: str) -> None:
    """Of so many digits, too, that Python does not print it."""
    for value in (10**400, 10**5000):
        with pytest.raises(ValueError, match=r" must be .*, got a number beyond float64$"):
            WRONG[what][0](value)


EXTREME: dict[str, Rule] = {
    "agc-eps-0": AGC(clip_factor=1e308, eps=0),
    "adagc-ratio": AdaGC(ratio=1e308, warmup=0),
    "adagc-eps-0": AdaGC(eps=0, max_norm=0.0, warmup=3),
    "adagc-eps": AdaGC(eps=1e308, warmup=3),
    "adagc-infinite": AdaGC(max_norm=INF, warmup=3),
    "zclip-z": ZClip(z=1e200, warmup=1),
    "zclip-z-eps": ZClip(z=1e308, eps=1e-308, warmup=1),
    "zclip-eps": ZClip(eps=1e308, warmup=1),
    "zclip-infinite": ZClip(max_norm=INF, warmup=2),
    "logz-k": LogZ(k=1e308, warmup=2),
    "logz-halflife": LogZ(halflife=1e-308, warmup=2),
    "logz-no-halflife": LogZ(halflife=INF, warmup=2),
    "logz-infinite": LogZ(max_norm=INF, warmup=2),
    "autoclip-infinite": AutoClip(max_norm=INF, window=2),
    "max-norm-0": MaxNorm(0.0),
    "max-norm-infinite": MaxNorm(INF),
}


@pytest.mark.parametrize("rule", EXTREME.values(), ids=EXTREME.keys())
def test_extreme_settings_make_no_nan(rule: Rule) -> None:
    """Of norms of 0, of equal ones, of spikes and of the largest; infinite ones stay out of the
    state as ever."""
    rows = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1e150, 0.0], [1e-150, 1e-300]]
    for decision in run_rows(rule, [*rows, [INF, 1.0], [2.0, 2.0], *rows[::-1]]):
        assert not decision.coef.isnan().any()
        assert not decision.threshold.isnan().any()
        assert all(tensor.isfinite().all() for tensor in decision.state.values())


def test_an_infinite_max_norm_of_adagc_is_none() -> None:
    rows = log_normal(12, 2)
    with_inf, without = (run_rows(AdaGC(max_norm=m, warmup=3), rows) for m in (INF, None))
    for a, b in zip(with_inf, without, strict=True):
        assert torch.equal(a.coef, b.coef)
        assert torch.equal(a.threshold, b.threshold)
        assert same(a.state, b.state)


def test_a_constant_warm_up_of_zclip_holds_the_norm() -> None:
    """As its documentation warns."""
    decisions = run(ZClip(warmup=3, max_norm=None), [2.0] * 3 + [4.0] * 50)
    assert all(d.threshold.item() == pytest.approx(2.0, rel=1e-9) for d in decisions[3:])


@pytest.mark.parametrize("what", ["warmup of AdaGC", "warmup of ZClip", "warmup of LogZ", "window"])
def test_steps_are_whole(what: str) -> None:
    with pytest.raises(TypeError, match=r"whole number.*got 2\.5"):
        WRONG[what][0](2.5)


def test_a_max_norm_of_two_elements() -> None:
    with pytest.raises(ValueError, match=r"^max_norm must have one element, got shape \(2,\)$"):
        MaxNorm(torch.ones(2))


@pytest.mark.parametrize("value", [-0.5, NAN])
def test_a_schedule_that_goes_wrong(value: float) -> None:
    rule = MaxNorm(lambda step: value if step == 3 else 1.0)
    assert rule.decide(measured([1.0], 2), {}).threshold.item() == 1
    with pytest.raises(ValueError, match=rf"^max_norm at step 3 must be .*, got {value}$"):
        rule.decide(measured([1.0], 3), {})


def test_a_schedule_that_gives_no_number() -> None:
    rule = MaxNorm(lambda step: torch.ones(()))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"^max_norm at step 0 must be a number.*tensor\(1\.\)"):
        rule.decide(measured([1.0]), {})


def test_the_example_of_a_rule() -> None:
    """The class in the documentation of `fastclip.rules` has ten lines and does what it says."""
    assert rules.__doc__ is not None
    code = textwrap.dedent(rules.__doc__.split("::\n\n")[1])
    assert sum(bool(line) for line in code.splitlines()) == 10
    names: dict[str, Any] = {"torch": torch, "Decision": Decision}
    exec(code, names)
    rule: Rule = names["TwiceTheMean"]()
    decisions = run(rule, [3.0, 3.0, NAN, 12.0, INF, 3.0])
    coefs = [decision.coef.item() for decision in decisions]
    mean = 0.99 * 3 + 0.01 * 12 * coefs[3]
    torch.testing.assert_close(
        coefs, [1.0, 1.0, NAN, 6 / (12 + 1e-6), 0.0, 1.0], equal_nan=True, rtol=1e-12, atol=0.0
    )
    assert decisions[-1].threshold.item() == pytest.approx(2 * mean, rel=1e-12)
    at = measured([1.0])
    with NoWaiting():
        rule.decide(at, rule.init(1, CPU))


def test_rules_are_there_without_an_import_of_their_own() -> None:
    assert fastclip.rules is rules
    assert {"MaxNorm", "AGC", "AdaGC", "ZClip", "LogZ", "AutoClip"} <= set(rules.__all__)
    assert all(hasattr(rules, name) for name in rules.__all__)


SIGNATURES = {
    MaxNorm: "(max_norm)",
    AGC: "(clip_factor=0.01, eps=0.001)",
    AdaGC: "(ratio=1.04, beta=0.99, warmup=100, max_norm=1.0, eps=1e-06)",
    ZClip: "(alpha=0.97, z=2.5, warmup=25, max_norm=1.0, eps=1e-06)",
    LogZ: "(k=4.0, halflife=100, warmup=50, max_norm=None)",
    AutoClip: "(percentile=10.0, window=1000, max_norm=None)",
}


@pytest.mark.parametrize("rule", SIGNATURES, ids=lambda rule: rule.__name__)
def test_signatures(rule: type) -> None:
    signature = inspect.signature(rule)
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    found = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(found) == SIGNATURES[rule]


@each_rule
def test_a_type_checker_takes_a_rule_for_one(rule: Rule) -> None:
    """Pyright, unlike mypy, refuses a ClassVar where `Rule` has a property."""
    assert "per_tensor" not in inspect.get_annotations(type(rule))
