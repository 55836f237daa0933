"""Training with FSDP2 and GradClipper comes out as it does in one process.

In float64 the order of sums is worth 1e-16 a step, so what remains after 50 steps is small; in
float32, in which a coefficient can be folded into the optimizer, AdamW makes of the last bits of
gradients near 0 differences of a share of its learning rate.
"""

import math
from typing import Any

import pytest
import torch

from tests import training
from tests.distributed import fitting
from tests.distributed.fitting import BAD, RULES, Run
from tests.distributed.ranks import Pool
from tests.training import near

STEPS = 50
# Relative, of all parameters as one vector and of a loss: 30 times what torch's own clipping has.
APART = {torch.float32: 1e-4, torch.float64: 1e-11}


def close(ours: Run, single: Run, tolerance: float) -> None:
    """Asserts that a run is that of one process."""
    __tracebackhide__ = True
    assert ours.counters == single.counters
    assert ours.scales == single.scales
    for step, pair in enumerate(zip(ours.losses, single.losses, strict=True)):
        assert pair[0] == pytest.approx(pair[1], rel=tolerance), f"loss of step {step}"
    for step, (mine, theirs) in enumerate(zip(ours.decided, single.decided, strict=True)):
        for name, value in theirs.items():
            expected = pytest.approx(value.tolist(), rel=100 * tolerance, nan_ok=True)
            assert mine[name].tolist() == expected, f"{name} of step {step}"
    near(ours.values, single.values, tolerance, "parameters")
    near(ours.moments, single.moments, 10 * tolerance, "moments")


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize("kind", fitting.OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 4])
def test_fifty_steps_are_those_of_one_process(
    ranks: Pool, size: int, kind: str, dtype: torch.dtype
) -> None:
    single = fitting.run(0, STEPS, kind, dtype=dtype)
    steps, clipped, skipped, _ = single.counters
    assert (steps, skipped) == (STEPS, 1)
    assert 3 < clipped < STEPS - 3
    for each in ranks.run(size, fitting.run, size, STEPS, kind, dtype=dtype):
        close(each, single, APART[dtype])


@pytest.mark.parametrize("kind", ["adamw-fused", "sgd"])
def test_with_a_scaler_too(ranks: Pool, kind: str) -> None:
    single = fitting.run(0, STEPS, kind, scaled=True)
    assert single.scales[BAD] < single.scales[BAD - 1]  # it has backed off
    assert max(single.scales) > single.scales[0]
    for each in ranks.run(4, fitting.run, 4, STEPS, kind, scaled=True):
        close(each, single, APART[torch.float32])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_decides_as_in_one_process(ranks: Pool, rule: str) -> None:
    steps = 30  # more than any rule's window, with two spikes
    arguments: tuple[Any, ...] = (steps, "adamw-fused", rule, torch.float64)
    single = fitting.run(0, *arguments)
    assert 0 < single.counters[1] < steps
    answers = ranks.run(4, fitting.run, 4, *arguments)
    for rank, each in enumerate(answers):
        close(each, single, APART[torch.float64])
        training.same(each.state, answers[0].state, f"state of rank {rank}")
        assert each.state.keys() == single.state.keys()
        for part in ("counters", "state"):
            torch.testing.assert_close(each.state[part], single.state[part], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_with_tensor_parallelism(ranks: Pool, rule: str) -> None:
    arguments: tuple[Any, ...] = (20, "adamw", rule, torch.float64)
    single = fitting.run(0, *arguments)
    assert single.counters[1] > 0
    for each in ranks.run(4, fitting.run, 4, *arguments, layout="fsdp-x-tensor"):
        close(each, single, APART[torch.float64])


@pytest.mark.parametrize("rule", RULES)
def test_a_state_is_loaded_and_gone_on_with(ranks: Pool, rule: str) -> None:
    for values, state in ranks.run(2, fitting.resumed, 2, 20, rule):
        assert values == []
        assert state == []


def test_what_is_compared_is_not_all_nan() -> None:
    single = fitting.run(0, STEPS, "adamw-fused")
    assert sum(map(math.isfinite, single.losses)) == STEPS
    assert single.losses[-1] < 0.6 * single.losses[0]
