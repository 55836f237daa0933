"""The rules for the global norm and AdaGC: equal to their formulas, and what they are good for."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastclip import table as tables
from fastclip.rules import AdaGC, AutoClip, Decision, LogZ, MaxNorm, Measured, Rule, ZClip
from tests import reference_rules as reference
from tests.stepping import CPU, RULES, log_normal, measured, of_total, run, run_rows

STEPS = 400
INF, NAN = math.inf, math.nan


def assert_equal(found: Tensor, wanted: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=0.0)


def columns(decisions: Sequence[Decision]) -> Tensor:
    """Coefficients and thresholds, ``[steps, 2]``."""
    return torch.stack([torch.stack([d.coef, d.threshold]) for d in decisions])


def expected(rule: reference.Global, totals: Tensor) -> Tensor:
    return torch.tensor([rule.decide(total) for total in totals.tolist()], dtype=torch.float64)


ZCLIPS = [
    {},
    {"max_norm": None},
    {"alpha": 0.9, "z": 1.5, "warmup": 1},
    {"alpha": 0.99, "z": 4.0, "warmup": 100, "max_norm": None},
    {"max_norm": 0.55, "eps": 1e-2},
    {"alpha": 0.0, "max_norm": None},
]


@pytest.mark.parametrize("options", ZCLIPS, ids=str)
def test_zclip_is_its_reference(options: dict[str, float | None]) -> None:
    totals = log_normal(STEPS)
    found = columns(run(ZClip(**options), totals))  # type: ignore[arg-type]
    wanted = expected(reference.ZClip(**options), totals)  # type: ignore[arg-type]
    assert (wanted[:, 0] < 1).sum() >= 5
    assert_equal(found, wanted)


def test_zclip_keeps_the_moments_of_its_warm_up() -> None:
    totals = log_normal(25, level=3.0)
    state = run(ZClip(), totals)[-1].state
    assert_equal(state["mean"], totals.mean())
    assert_equal(state["var"], totals.var(correction=0))
    assert state["count"].item() == 25


def test_zclip_by_hand() -> None:
    state = {"mean": 1.0, "var": 0.25}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()}
    rule = ZClip(z=2.0, warmup=1, max_norm=None, eps=1e-12)
    decision = rule.decide(of_total(3.0), {**tensors, "count": torch.tensor(1)})
    # a score of (3 - 1) / 0.5 = 4, and a threshold of 1 + 2**2 * 0.5 / 4
    assert decision.threshold.item() == pytest.approx(1.5, rel=1e-10)
    assert decision.coef.item() == pytest.approx(1.5 / 3, rel=1e-6)
    assert decision.state["mean"].item() == pytest.approx(0.97 * 1 + 0.03 * 1.5, rel=1e-10)


ADAGCS = [
    {},
    {"max_norm": None},
    {"ratio": 1.5, "beta": 0.9, "warmup": 10},
    {"ratio": 1.05, "beta": 0.98, "warmup": 0},
    {"max_norm": 0.2, "eps": 1e-3, "warmup": 1},
]


@pytest.mark.parametrize("options", ADAGCS, ids=str)
def test_adagc_is_its_reference(options: dict[str, float | None]) -> None:
    norms = log_normal(STEPS, 5)
    rule, peer = AdaGC(**options), reference.AdaGC(**options)  # type: ignore[arg-type]
    found = torch.stack([torch.stack([d.coef, d.threshold], 1) for d in run_rows(rule, norms)])
    rows = [peer.decide(dict(enumerate(row))) for row in norms.tolist()]
    wanted = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64)
    assert (wanted[:, :, 0] < 1).sum() > 100
    assert_equal(found, wanted)


def test_a_tensor_that_comes_late_warms_up_by_itself() -> None:
    """And one that is away for a while keeps its history."""
    rule, peer = AdaGC(warmup=5), reference.AdaGC(warmup=5)
    norms = log_normal(60, 3, level=1.0)
    states = {key: rule.init(1, CPU) for key in range(3)}
    for step, row in enumerate(norms.tolist()):
        keys = [key for key, start in enumerate((0, 20, 3)) if step >= start]
        if 30 <= step < 40:
            keys.remove(0)
        of_keys = torch.tensor([row[key] for key in keys], dtype=torch.float64)
        aligned = {
            name: torch.cat([states[key][name] for key in keys]) for name in ("gamma", "count")
        }
        total = of_keys.square().sum().sqrt()
        decision = rule.decide(Measured(total, of_keys, step, [], [], None), aligned)
        for row_number, key in enumerate(keys):
            states[key] = {
                name: t[row_number : row_number + 1] for name, t in decision.state.items()
            }
        wanted = list(peer.decide({key: row[key] for key in keys}).values())
        found = torch.stack([decision.coef, decision.threshold], 1)
        assert_equal(found, torch.tensor(wanted, dtype=torch.float64))
    assert [states[key]["count"].item() for key in range(3)] == [50, 40, 57]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_tensor_that_is_0_in_its_warm_up_is_left_out_of_those_steps(warmup: int) -> None:
    """As LoRA's A, and experts without tokens: it warms up with its first other gradients."""
    rule, peer = AdaGC(warmup=warmup), reference.AdaGC(warmup=warmup)
    norms = log_normal(40, 2)
    idle = [0, 1, 3] if warmup > 1 else [0, 1]
    norms[idle, 1] = 0.0
    decisions = run_rows(rule, norms)
    for step, (decision, row) in enumerate(zip(decisions, norms.tolist(), strict=True)):
        before = decisions[step - 1].state if step else rule.init(2, CPU)
        wanted = peer.decide({key: n for key, n in enumerate(row) if n > 0})
        if step in idle:
            assert decision.coef[1].item() == 1.0
            assert all(torch.equal(decision.state[name][1], before[name][1]) for name in before)
        found = torch.stack([decision.coef, decision.threshold], 1)[list(wanted)]
        assert_equal(found, torch.tensor(list(wanted.values()), dtype=torch.float64))
    assert decisions[-1].state["count"].tolist() == [40, 40 - len(idle)]
    assert decisions[-1].state["gamma"].min() > 0


def test_a_tensor_that_is_0_after_its_warm_up_counts() -> None:
    rule, peer = AdaGC(warmup=2), reference.AdaGC(warmup=2)
    found = [decision.state["gamma"].item() for decision in run_rows(rule, [[1.0], [2.0], [0.0]])]
    for n in (1.0, 2.0, 0.0):
        peer.decide({0: n})
    assert found[-1] == pytest.approx(peer.gamma[0], rel=1e-12)
    assert found[-1] < found[-2]


LOGZS = [
    {},
    {"max_norm": 0.6},
    {"k": 1.0, "halflife": 5, "warmup": 2},
    {"k": 2.5, "halflife": 0.5, "warmup": 10},
]


@pytest.mark.parametrize("options", LOGZS, ids=str)
def test_logz_is_its_formula(options: dict[str, float | None]) -> None:
    totals = log_normal(STEPS)
    found = columns(run(LogZ(**options), totals))  # type: ignore[arg-type]
    wanted = expected(reference.LogZ(**options), totals)  # type: ignore[arg-type]
    assert (wanted[50:, 0] < 1).sum() > 5
    # exp turns an absolute error of the exponent, with its 1e-16 of mean and spread, into a
    # relative one; and the mean of what is nearly forgotten is divided by a deviation near 0
    assert_equal(found, wanted, rtol=1e-10)


def test_logz_by_hand() -> None:
    rule = LogZ(k=1.0, halflife=1, warmup=2)
    *_, decision = run(rule, [1.0, math.e, 10.0])
    mean = 2 / 3  # of 0 and 1 with weights 1/2 and 1
    std = math.sqrt((0.5 * mean**2 + (1 - mean) ** 2) / 1.5)
    assert decision.threshold.item() == pytest.approx(math.exp(mean + std), rel=1e-12)
    assert decision.coef.item() == pytest.approx(math.exp(mean + std) / (10 + 1e-6), rel=1e-12)


def limit(state: dict[str, Tensor], k: float) -> tuple[float, float]:
    """LogZ's m + k * s and s."""
    std = (state["spread"] / state["weight"]).sqrt().item()
    return state["mean"].item() + k * std, std


@pytest.mark.parametrize("k", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("halflife", [10.0, 100.0])
@pytest.mark.parametrize("size", [1e2, 1e6, 1e300])
def test_a_spike_does_not_lift_the_threshold_of_logz(
    k: float, halflife: float, size: float
) -> None:
    rule = LogZ(k=k, halflife=halflife)
    state = run(rule, log_normal(200, spikes=0.0))[-1].state
    before, std = limit(state, k)
    decision = rule.decide(of_total(size), state)
    assert decision.threshold.item() == pytest.approx(math.exp(before), rel=1e-12)
    after, _ = limit(decision.state, k)
    newest = 1 / decision.state["weight"].item()
    assert before <= after <= before + newest * k * (k**2 + 1) / 2 * std * (1 + 1e-9)
    # however large: the next spike of the same size is cut to nearly the same norm
    assert rule.decide(of_total(size), decision.state).threshold.item() < 3 * math.exp(before)


@pytest.mark.parametrize("rule", [LogZ(), AutoClip(), AutoClip(90.0, window=7)], ids=str)
def test_equal_norms_are_never_clipped(rule: Rule) -> None:
    for level in (10 ** torch.empty(20).uniform_(-30, 30)).tolist():
        found = columns(run(rule, [level] * 60))
        assert torch.equal(found, torch.tensor([[1.0, INF]] * 60, dtype=torch.float64))


def test_zclip_at_its_max_norm() -> None:
    """As the authors': torch's coefficient in warm-up, after it none for a norm up to max_norm."""
    found = columns(run(ZClip(warmup=3, max_norm=0.1), [0.1] * 6))
    warm, after = [0.1 / (0.1 + 1e-6), 0.1], [1.0, 0.1]
    assert_equal(found, torch.tensor([warm] * 3 + [after] * 3, dtype=torch.float64))


@pytest.mark.parametrize("factor", [1e-8, 0.125, 7.0, 1e12])
@pytest.mark.parametrize("rule", [LogZ(k=2.0), AutoClip()], ids=str)
def test_thresholds_scale_with_the_norms(rule: Rule, factor: float) -> None:
    """As the loss is multiplied by a constant."""
    totals = log_normal(200)
    found = columns(run(rule, totals * factor))[:, 1]
    wanted = columns(run(rule, totals))[:, 1] * factor
    assert wanted.isfinite().any()
    assert_equal(found, wanted, rtol=1e-10)


def test_logz_passes_over_a_norm_of_zero() -> None:
    rule = LogZ(warmup=2)
    states = [d.state for d in run(rule, [1.0, 2.0, 3.0])]
    decision = rule.decide(of_total(0.0), states[-1])
    assert decision.coef.item() == 1
    assert all(torch.equal(decision.state[name], states[-1][name]) for name in states[-1])


@pytest.mark.parametrize("window", [1, 7, 50, 1000])
@pytest.mark.parametrize("percentile", [0.0, 10.0, 33.3, 50.0, 99.0, 100.0])
def test_autoclip_is_the_quantile(percentile: float, window: int) -> None:
    totals = log_normal(150)
    for step, decision in enumerate(run(AutoClip(percentile, window), totals)):
        last = totals[max(0, step + 1 - window) : step + 1]
        quantile = torch.quantile(last, percentile / 100)
        binds = totals[step] > quantile
        wanted = quantile if binds else torch.tensor(INF, dtype=torch.float64)
        assert_equal(decision.threshold, wanted)
        assert (decision.coef < 1) == binds


@pytest.mark.parametrize("options", [{}, {"percentile": 80.0, "window": 30, "max_norm": 0.6}])
def test_autoclip_is_its_reference(options: dict[str, float]) -> None:
    totals = log_normal(STEPS)
    found = columns(run(AutoClip(**options), totals))  # type: ignore[arg-type]
    wanted = expected(reference.AutoClip(**options), totals)  # type: ignore[arg-type]
    assert_equal(found, wanted)


def test_max_norm_of_every_kind() -> None:
    totals = log_normal(20, level=2.0)
    schedule = MaxNorm(lambda step: 1.0 / (1 + step))
    for step, total in enumerate(totals):
        at = of_total(total.item(), step)
        for rule, number in (
            (MaxNorm(1), 1.0),
            (MaxNorm(torch.tensor(0.5)), 0.5),
            (MaxNorm(torch.tensor([0.5], requires_grad=True)), 0.5),
            (schedule, 1.0 / (1 + step)),
        ):
            decision = rule.decide(at, {})
            assert decision.coef.item() == min(1.0, number / (total.item() + 1e-6))
            assert decision.threshold.item() == number
            assert not decision.threshold.requires_grad


@pytest.mark.parametrize("infinite", [INF, torch.tensor(INF), lambda step: INF])
@pytest.mark.parametrize("total", [0.0, 1e300, INF, NAN])
def test_an_infinite_max_norm_only_measures(infinite: float | Tensor, total: float) -> None:
    decision = MaxNorm(infinite).decide(of_total(total), {})
    assert (decision.coef.item(), decision.threshold.item()) == (1.0, INF)


# After the warm-ups of `RULES`; an uncapped rule in warm-up changes nothing, whatever the norm.
@pytest.mark.parametrize("name", [name for name in RULES if name != "max-norm-schedule"])
def test_the_coefficient_of_a_norm_that_is_not_finite(name: str) -> None:
    rule = RULES[name]
    state = run_rows(rule, [[0.5, 1.0 + i / 10] for i in range(6)])[-1].state
    for bad, coef in ((NAN, NAN), (INF, 0.0)):
        found = rule.decide(measured([0.5, bad], 6), state).coef
        last = found if found.dim() == 0 else found[1]
        torch.testing.assert_close(last.item(), coef, equal_nan=True)


norm = st.one_of(st.just(0.0), st.floats(1e-30, 1e30))  # a coefficient is then no denormal number


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(norm, min_size=3, max_size=3), min_size=1, max_size=12))
@pytest.mark.parametrize("name", [name for name in RULES if name != "agc"])
def test_coefficients_keep_norms_under_the_threshold(name: str, steps: list[list[float]]) -> None:
    for decision, norms in zip(run_rows(RULES[name], steps), steps, strict=True):
        at = measured(norms)
        own = at.norms if RULES[name].per_tensor else at.total
        assert ((decision.coef >= 0) & (decision.coef <= 1)).all()
        assert (decision.coef * own <= decision.threshold * (1 + 1e-12)).all()
        assert all(tensor.isfinite().all() for tensor in decision.state.values())


@pytest.mark.parametrize("name", RULES)
def test_norms_whose_squares_overflow_do_not_spoil_the_state(name: str) -> None:
    state = RULES[name].init(1, CPU)
    for total in (1.0, 1e200, 1e308, 2.0, 3.0, 1e300):
        total_norm = torch.tensor(total, dtype=torch.float64)
        at = Measured(total_norm, total_norm[None], 0, [torch.ones(2)], [torch.ones(2)], None)
        state = RULES[name].decide(at, state).state
        assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.parametrize("rule", [ZClip(), LogZ(max_norm=1.0), AutoClip(max_norm=1.0)], ids=str)
def test_max_norm_caps_what_the_rule_allows(rule: ZClip | LogZ | AutoClip) -> None:
    totals = log_normal(200, level=2.0)
    free = columns(run(replace(rule, max_norm=None), totals))
    capped = columns(run(rule, totals))
    assert_equal(capped[:, 1], free[:, 1].clamp(max=1.0))
    plain = torch.stack([tables.coefficient(total, 1.0) for total in totals])
    assert_equal(capped[:, 0], torch.minimum(free[:, 0], plain), rtol=2e-6)
