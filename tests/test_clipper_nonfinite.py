"""Steps with a NaN or an infinity, for every policy, rule and optimizer.

A skipped step must be as if it had never come: a run with bad steps ends bitwise where the run
without them ends.
"""

import math
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from fastclip import GradClipper
from tests import training
from tests.training import BAD, FUSED, OPTIMIZERS, POLICIES, RULES, Parameters

# In the very first step, in warm-up, two in a row after it (one of them 15 times as large), last.
BAD_STEPS = {step: BAD[i % 3] for i, step in enumerate((0, 3, 10, 11, 16, 21))}
STEPS = 22

FEW = ["adam-fused", "dampening-fused", "momentum-fused", "adagrad-fused", "adamw-foreach"]
SOME = ("adam", "momentum", "dampening", "adagrad", "rmsprop", "nadam")


class Run:
    """Parameters, an optimizer and a clipper."""

    def __init__(self, rule: str, optimizer: str, policy: str = "skip") -> None:
        self.params: Parameters = training.parameters()
        self.optimizer: Optimizer = training.optimizer(optimizer, self.params)
        self.clipper: GradClipper = training.clipper(self.params, rule, nonfinite=policy)

    def step(self, grads: training.Gradients) -> Any:
        training.assign(self.params, grads)
        return self.clipper.step(self.optimizer)

    def state(self) -> dict[str, Any]:
        """Everything that a step may change, but gradients and counters."""
        return {
            "parameters": training.values(self.params),
            "optimizer": training.snapshot(self.optimizer.state_dict()["state"]),
            "rule": training.rule_state(self.clipper),
        }


def as_if_unused(run: Run) -> list[str]:
    """Moments and step counters that are not 0, as they are before the first step."""
    return [
        f"{name}: {value.tolist()}"
        for name, value in training.moments(run.optimizer).items()
        if not (value == 0).all()
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o.startswith(SOME)])
def test_a_skipped_step_never_was(rule: str, optimizer: str) -> None:
    run, without = Run(rule, optimizer), Run(rule, optimizer)
    skipped = consecutive = 0
    for step, grads in enumerate(training.stream(STEPS, bad=BAD_STEPS)):
        before = run.state()
        stats = run.step(grads)
        bad = step in BAD_STEPS
        assert bool(stats.skipped) == bad, f"step {step}"
        assert stats.found_inf.item() == float(bad)
        skipped, consecutive = skipped + bad, (consecutive + 1) * bad
        counters = training.counted(run.clipper)
        assert (counters[0], *counters[2:]) == (step + 1, skipped, consecutive)
        assert not training.nonfinite(run.optimizer)
        if not bad:
            without.step(grads)
            training.same(run.state(), without.state(), when=f"step {step}")
        elif step > 0:
            training.same(run.state(), before, when=f"step {step}")
        else:  # what is made in the first step may be there, with its initial values
            params = training.values(run.params)
            training.same(params, before["parameters"])
            assert not as_if_unused(run)
    assert training.counted(run.clipper)[1] == training.counted(without.clipper)[1]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_from_the_very_first_step(optimizer: str, bad: float) -> None:
    """Three skips before the first step that is taken, for each of the values."""
    run, without = Run("MaxNorm", optimizer), Run("MaxNorm", optimizer)
    for grads in training.stream(3, seed=5, bad=dict.fromkeys(range(3), bad)):
        assert run.step(grads).skipped
        assert not as_if_unused(run)
    assert training.counted(run.clipper) == (3, 0, 3, 3)
    for grads in training.stream(3):
        assert not run.step(grads).skipped
        without.step(grads)
    training.same(run.state(), without.state())
    assert training.counted(run.clipper)[2:] == (3, 0)


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_parameter_that_gets_its_first_gradient_in_a_skipped_step(optimizer: str) -> None:
    run, without = Run("MaxNorm", optimizer), Run("MaxNorm", optimizer)
    bad, *good = training.stream(4, bad={0: math.nan})
    late = {"layer.bias": None} | {k: v for k, v in bad.items() if k != "layer.bias"}
    run.step(late)
    run.step(bad)
    for grads in good:
        run.step(grads)
        without.step(grads)
    training.same(run.state(), without.state())


@pytest.mark.parametrize("optimizer", FEW)
@pytest.mark.parametrize("rule", RULES)
def test_error_leaves_everything(rule: str, optimizer: str) -> None:
    run, without = Run(rule, optimizer, "error"), Run(rule, optimizer, "error")
    for step, grads in enumerate(training.stream(STEPS, bad=BAD_STEPS)):
        if step not in BAD_STEPS:
            run.step(grads)
            without.step(grads)
            training.same(run.state(), without.state(), when=f"step {step}")
            continue
        before = training.snapshot([run.state(), run.clipper.counters(), grads])
        with pytest.raises(RuntimeError, match=r"layer\.weight"):
            run.step(grads)
        now = [run.state(), run.clipper.counters(), training.gradients(run.params)]
        training.same(now, before, when=f"step {step}")
    assert training.counted(run.clipper) == training.counted(without.clipper)


@pytest.mark.parametrize("optimizer", FEW)
@pytest.mark.parametrize("rule", RULES)
def test_zero_steps_with_the_rest(rule: str, optimizer: str) -> None:
    """Bitwise the run in which those elements are zeros already."""
    run, zeroed = Run(rule, optimizer, "zero"), Run(rule, optimizer, "zero")
    grads = training.stream(STEPS, bad=BAD_STEPS)
    for step, one in enumerate(grads):
        stats = run.step(one)
        zeros = zeroed.step({k: v.nan_to_num(0.0, 0.0, 0.0) for k, v in one.items()})
        training.same(run.state(), zeroed.state(), when=f"step {step}")
        assert (stats.found_inf.item(), bool(stats.skipped)) == (0.0, False)
        assert stats.nonfinite_count.item() == (step in BAD_STEPS)
        training.same(
            [stats.coef, stats.threshold, stats.total_norm, stats.clipped],
            [zeros.coef, zeros.threshold, zeros.total_norm, zeros.clipped],
        )
    assert training.counted(run.clipper) == training.counted(zeroed.clipper)
    assert training.counted(run.clipper)[2:] == (0, 0)


@pytest.mark.parametrize("optimizer", FEW)
@pytest.mark.parametrize("rule", RULES)
def test_propagate_steps_and_keeps_the_rules_state(rule: str, optimizer: str) -> None:
    """The parameters are lost, as in torch; the rule must not be: it decides from then on as in the
    run without the bad steps."""
    run, without = Run(rule, optimizer, "propagate"), Run(rule, optimizer, "propagate")
    for step, grads in enumerate(training.stream(STEPS, bad=BAD_STEPS)):
        before = training.rule_state(run.clipper)
        stats = run.step(grads)
        assert stats.found_inf.item() == float(step in BAD_STEPS)
        assert not stats.skipped
        now = training.rule_state(run.clipper)
        assert not training.with_nonfinite(now), f"step {step}"
        if step in BAD_STEPS and step > 0 and rule != "AdaGC":  # its other tensors go on: see below
            training.same(now, before, when=f"step {step}")
        if step not in BAD_STEPS and rule not in ("AdaGC", "AGC"):
            expected = without.step(grads)
            for ours, theirs in (
                (stats.coef, expected.coef),
                (stats.threshold, expected.threshold),
            ):
                training.same(ours, theirs, when=f"step {step}")
            training.same(now, training.rule_state(without.clipper))
    assert not run.params["layer.weight"].isfinite().all()
    assert training.counted(run.clipper)[0] == STEPS
    assert training.counted(run.clipper)[2:] == (0, 0)


@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_adagc_keeps_a_bad_tensors_history(policy: str) -> None:
    """Under "skip" that of every tensor."""
    run = Run("AdaGC", "sgd-foreach", policy)
    for step, grads in enumerate(training.stream(15, bad={9: math.nan})):
        before = training.rule_state(run.clipper)
        run.step(grads)
        if step == 9:
            now = training.rule_state(run.clipper)
            changed = " ".join(training.differences(now, before))
            assert "layer.weight" not in changed
            assert ("embed.weight" in changed) == (policy == "propagate")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["adam-fused", "adam-foreach"])
def test_all_of_a_gradient_is_bad(optimizer: str, policy: str) -> None:
    run = Run("MaxNorm", optimizer, policy)
    before = training.values(run.params)
    grads = {name: torch.full(shape, math.nan) for name, shape in training.SHAPES.items()}
    if policy == "error":
        with pytest.raises(RuntimeError, match=r"embed\.weight.*18 NaN"):
            run.step(grads)
    else:
        stats = run.step(grads)
        assert stats.nan_count.tolist() == [18, 20, 4, 1]
        assert stats.total_norm.item() == pytest.approx(
            0.0 if policy == "zero" else math.nan, nan_ok=True
        )
    moved = training.differences(training.values(run.params), before)
    assert bool(moved) == (policy == "propagate")  # Adam does not move on gradients of 0
