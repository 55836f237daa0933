"""A step with a fused optimizer never reads a value on the host."""

import math

import pytest
import torch

import fastclip
from fastclip import GradClipper
from tests import training
from tests.forbidding import MODES, HostRead
from tests.training import FUSED, ONE_COEFFICIENT

STEPS = 10
BAD = {4: math.nan, 8: math.inf}
POLICIES = ["skip", "propagate"]


READS = {
    "item": lambda x: x.item(),
    "float": float,
    "bool": bool,
    "if": lambda x: 1 if x > 0 else 0,
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize(
    ("mode", "read"),
    [("dispatch", read) for read in READS if read not in ("cpu", "tolist")]
    + [("methods", read) for read in READS if read not in ("equal", "mask")],
)
def test_the_check_itself(mode: str, read: str) -> None:
    value = torch.tensor(1.0)
    with MODES[mode](), pytest.raises(HostRead):
        READS[read](value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ONE_COEFFICIENT)
@pytest.mark.parametrize("optimizer", FUSED)
def test_step(optimizer: str, rule: str, policy: str, mode: str) -> None:
    params = training.parameters()
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params, rule, nonfinite=policy)
    skipped = []
    for step, grads in enumerate(training.stream(STEPS, bad=BAD)):
        training.assign(params, grads)
        if step == 0:  # torch's own lazy state; what the first step may do is tested below
            clipper.step(made)
            continue
        with MODES[mode]():
            skipped.append(clipper.step(made).skipped)
    assert [bool(x) for x in skipped] == [policy == "skip" and s in BAD for s in range(1, STEPS)]
    assert training.counted(clipper)[0] == STEPS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("optimizer", [name for name in FUSED if name != "dampening-fused"])
def test_the_first_step(optimizer: str, bad: bool, mode: str) -> None:
    """But for SGD with dampening, whose first step the flag cannot undo without a look at it."""
    params = training.parameters()
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params)
    training.assign(params, training.stream(1, bad={0: math.nan} if bad else {})[0])
    with MODES[mode]():
        stats = clipper.step(made)
    assert bool(stats.skipped) == bad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["MaxNorm", "LogZ"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_step_with_a_scaler(optimizer: str, rule: str, policy: str, mode: str) -> None:
    params, scaler = training.parameters(), training.make_scaler()
    made = training.optimizer(optimizer, params)
    clipper = training.clipper(params, rule, nonfinite=policy)
    for step, grads in enumerate(training.stream(STEPS, bad=BAD)):
        training.backward(params, grads, scaler)
        if step == 0:
            clipper.step(made, scaler)
            scaler.update()
            continue
        with MODES[mode]():
            clipper.step(made, scaler)
            scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert training.counted(clipper)[0] == STEPS


@pytest.mark.parametrize("mode", MODES)
def test_propagate_needs_no_look_at_the_flag(mode: str) -> None:
    """Not fused either: of torch's foreach optimizers SGD reads nothing itself."""
    params = training.parameters()
    made = training.optimizer("momentum-foreach", params)
    clipper = training.clipper(params, nonfinite="propagate")
    for grads in training.stream(3):
        training.assign(params, grads)
        with MODES[mode]():
            clipper.step(made)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", [*ONE_COEFFICIENT, "AdaGC"])
def test_clip_and_measure(rule: str, policy: str, mode: str) -> None:
    params = training.parameters()
    clipper = training.clipper(params, rule, nonfinite=policy)
    for grads in training.stream(STEPS, bad=BAD):
        training.assign(params, grads)
        with MODES[mode]():
            clipper.measure()
            clipper.clip_()
            clipper.counters()


@pytest.mark.parametrize("mode", MODES)
def test_schedules_and_tensors(mode: str) -> None:
    for max_norm in (torch.tensor(5.0), lambda step: 5.0 / (step + 1)):
        params = training.parameters()
        made = training.optimizer("adam-fused", params)
        clipper = GradClipper(params.items(), max_norm)
        for grads in training.stream(4):
            training.assign(params, grads)
            with MODES[mode]():
                clipper.step(made)
        assert training.counted(clipper)[0] == 4


def test_the_unfused_step_reads_the_flag_once() -> None:
    """Which also shows that the dispatch mode sees what the clipper does."""
    params = training.parameters()
    made = training.optimizer("momentum-foreach", params)
    clipper = fastclip.GradClipper(params.items(), 5.0)
    training.assign(params, training.stream(1)[0])
    with MODES["dispatch"](), pytest.raises(HostRead):
        clipper.step(made)
