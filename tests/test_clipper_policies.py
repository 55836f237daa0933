"""What the policy table and its fine print say of a single clip, on every backend."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip import GradClipper
from fastclip.rules import AutoClip, LogZ, MaxNorm, Rule, ZClip
from tests import training
from tests.making import floats, grads_of, parameters, snapshot, unchanged
from tests.training import BAD, POLICIES

pytestmark = pytest.mark.usefixtures("each_backend")

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf


def pairs(*grads: Tensor | None) -> list[tuple[str, Tensor]]:
    return [(f"layer{i}", parameter) for i, parameter in enumerate(parameters(*grads))]


@pytest.mark.parametrize("bad", BAD)
def test_skip_leaves_gradients_alone(bad: float) -> None:
    grads = [floats(3.0, bad, 0.0), floats(4.0, dtype=BF16), floats(-0.0, dtype=F64)]
    before = snapshot(grads)
    clipper = GradClipper(pairs(*grads), 1.0)
    stats = clipper.clip_()
    assert unchanged(grads, before)
    assert stats.total_norm.item() == pytest.approx(abs(bad), nan_ok=True)
    assert stats.coef.item() == 1.0
    assert (stats.found_inf.item(), stats.found_inf.dtype) == (1.0, F32)
    assert (stats.clipped.item(), stats.skipped.item()) == (False, True)
    assert stats.nan_count.tolist() == [int(math.isnan(bad)), 0, 0]
    assert stats.inf_count.tolist() == [int(math.isinf(bad)), 0, 0]
    assert training.counted(clipper) == (1, 0, 1, 1)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_zero_clips_the_rest(dtype: torch.dtype) -> None:
    grads = [floats(3.0, NAN, 0.0, INF, dtype=dtype), floats(-INF, 4.0, dtype=dtype)]
    clipper = GradClipper(pairs(*grads), 1.0, nonfinite="zero")
    stats = clipper.clip_()
    coef = 1 / (5 + 1e-6)
    expected = [[3 * coef, 0.0, 0.0, 0.0], [0.0, 4 * coef]]
    tolerance = max(torch.finfo(dtype).eps, 2e-7)
    for grad, want in zip(grads, expected, strict=True):
        assert grad.tolist() == pytest.approx(want, rel=tolerance)
    assert stats.total_norm.item() == 5.0
    assert stats.coef.item() == pytest.approx(coef, rel=1e-6)
    assert stats.found_inf.item() == 0.0
    assert (stats.clipped.item(), stats.skipped.item()) == (True, False)
    # what was found before, the zeros too
    assert stats.nan_count.tolist() == [1, 0]
    assert stats.inf_count.tolist() == [1, 1]
    assert stats.zero_count.tolist() == [1, 0]
    assert stats.nonfinite_count.item() == 3
    assert stats.norms.tolist() == pytest.approx([3.0, 4.0], rel=1e-6)
    assert training.counted(clipper) == (1, 1, 0, 0)


def test_zero_without_a_clip_writes_the_bad_elements_alone() -> None:
    grads = [floats(3.0, NAN, -0.0, INF), floats(1e-44)]
    clipper = GradClipper(pairs(*grads), 100.0, nonfinite="zero")
    stats = clipper.clip_()
    assert unchanged(grads, [floats(3.0, 0.0, -0.0, 0.0), floats(1e-44)])
    assert not stats.clipped
    assert training.counted(clipper) == (1, 0, 0, 0)


@pytest.mark.parametrize("call", ["clip_", "step"])
def test_error_names_the_parameters(call: str) -> None:
    grads = [floats(3.0, NAN, NAN), floats(4.0), floats(INF)]
    before = snapshot(grads)
    listed = pairs(*grads)
    clipper = GradClipper(listed, 1.0, nonfinite="error")
    optimizer = torch.optim.SGD([p for _, p in listed], lr=1.0)
    with pytest.raises(RuntimeError, match=r"layer0.*2 NaN.*layer2.*1 inf") as raised:
        clipper.clip_() if call == "clip_" else clipper.step(optimizer)
    assert "layer1" not in str(raised.value)
    assert unchanged(grads, before)
    assert all(bool((p == 0).all()) for _, p in listed)
    assert training.counted(clipper) == (0, 0, 0, 0)
    listed[0][1].grad, listed[2][1].grad = floats(3.0, 0.0, 0.0), floats(0.0)
    assert clipper.clip_().found_inf.item() == 0.0
    assert training.counted(clipper) == (1, 1, 0, 0)


@pytest.mark.parametrize("bad", BAD)
def test_propagate_is_torch(bad: float) -> None:
    values = [floats(3.0, bad, 0.0), floats(4.0, 1.0)]
    ours, theirs = (parameters(*(v.clone() for v in values)) for _ in range(2))
    stats = GradClipper(ours, 1.0, nonfinite="propagate").clip_()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stats.total_norm, norm, rtol=0, atol=0, equal_nan=True)
    assert stats.found_inf.item() == 1.0
    assert not stats.skipped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_norm", [0.5, 5.000002, 100.0, 0.0, INF, torch.tensor(2.0)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_finite_gradients(policy: Any, max_norm: float | Tensor, dtype: torch.dtype) -> None:
    """Every policy does the same, and what the fields say is what was done."""
    ours, theirs = (
        parameters(floats(3.0, 0.0, dtype=dtype), floats(4.0, dtype=dtype)) for _ in "ab"
    )
    clipper = GradClipper(ours, max_norm, nonfinite=policy)
    stats = clipper.clip_()
    norm = fastclip.clip_grad_norm_(theirs, max_norm)
    assert unchanged(grads_of(ours), grads_of(theirs))
    coef = min(1.0, float(max_norm) / (5 + 1e-6))
    for name, value in {
        "total_norm": norm.item(),
        "coef": pytest.approx(coef, rel=1e-6),
        "threshold": pytest.approx(float(max_norm), rel=1e-7),
        "norms": pytest.approx([3.0, 4.0], rel=1e-6),
        "max_abs": [3.0, 4.0],
    }.items():
        field = getattr(stats, name)
        assert field.dtype == dtype, name
        assert field.tolist() == value, name
    fields = (stats.found_inf, stats.clipped, stats.skipped, stats.nonfinite_count)
    assert [field.item() for field in fields] == [0.0, coef < 1, False, 0]
    assert [field.dtype for field in fields] == [F32, torch.bool, torch.bool, torch.int64]
    assert all(field.shape == () for field in (*fields, stats.total_norm, stats.coef))
    assert training.counted(clipper) == (1, coef < 1, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", training.RULES)
def test_measure_changes_nothing(rule: str, policy: str) -> None:
    params = training.parameters()
    clipper = training.clipper(params, rule, nonfinite=policy)
    for step, grads in enumerate(training.stream(14, bad={4: NAN, 12: INF})):
        training.assign(params, grads)
        if step == 0:
            clipper.measure()  # the rule's state may be made now, with its initial values
        before = training.snapshot([clipper.state_dict(), grads, training.values(params)])
        stats = clipper.measure()
        now = [clipper.state_dict(), training.gradients(params), training.values(params)]
        training.same(now, before, when=f"step {step}")
        bad = step in (4, 12)
        assert stats.nonfinite_count.item() == bad
        assert stats.found_inf.item() == float(bad and policy != "zero")
        if bad and policy == "error":
            continue
        then = clipper.clip_()
        training.same(
            [stats.coef, stats.threshold, stats.total_norm, stats.table],
            [then.coef, then.threshold, then.total_norm, then.table],
            when=f"step {step}: measure() does not say what clip_() does",
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", training.RULES)
def test_no_gradients(rule: str, policy: str) -> None:
    """A step, which changes nothing; neither at first nor after others."""
    params, alone = training.parameters(), training.parameters()
    clipper, without = (training.clipper(side, rule, nonfinite=policy) for side in (params, alone))
    optimizer = training.optimizer("adam-fused", params)
    before = training.values(params)
    for number, grads in enumerate(training.stream(3)):
        training.assign(params, {})
        for stats in (clipper.measure(), clipper.clip_(), clipper.step(optimizer)):
            assert stats.names == ()
            assert stats.coef.tolist() == ([] if rule in training.PER_TENSOR else 1.0)
            assert [stats.total_norm.item(), stats.found_inf.item()] == [0, 0]
            assert (stats.clipped.item(), stats.skipped.item()) == (False, False)
        training.same(training.values(params), before)
        assert training.counted(clipper)[::2] == (3 * number + 2, 0)
        for side, made in ((params, clipper), (alone, without)):
            training.assign(side, grads)
            made.clip_()
    training.same(training.rule_state(clipper), training.rule_state(without))


def schedule(step: int) -> float:
    return 5.0 + step


THRESHOLDS = [
    (MaxNorm(5.0), 5.0),
    (MaxNorm(torch.tensor(5.0)), 5.0),
    (MaxNorm(schedule), 5.0),
    (MaxNorm(INF), INF),
    (ZClip(max_norm=3.0), 3.0),
    (ZClip(max_norm=None), INF),
    (LogZ(max_norm=3.0), 3.0),
    (AutoClip(), INF),
]


def without_address(value: object) -> str:
    return str(value).replace(str(schedule), "schedule")


@pytest.mark.parametrize(("rule", "threshold"), THRESHOLDS, ids=without_address)
def test_the_threshold_without_gradients(rule: Rule, threshold: float) -> None:
    stats = GradClipper(parameters(None), rule=rule).clip_()
    assert stats.threshold.item() == threshold


def test_statistics_and_counters_are_of_their_own_step() -> None:
    """What is kept of a step for later does not change when the next one comes."""
    params = training.parameters()
    clipper = training.clipper(params, "ZClip")
    kept: list[tuple[Any, Any]] = []
    for grads in training.stream(12, bad={2: NAN}):
        training.assign(params, grads)
        stats = clipper.clip_()
        things = [stats.cpu(), clipper.counters(), clipper.state_dict()]
        plain = [{name: getattr(things[0], name) for name in fastclip.stats.FIELDS}, *things[1:]]
        kept.append((plain, training.snapshot(plain)))
    for step, (now, then) in enumerate(kept):
        training.same(now, then, when=f"of step {step}")


def test_counters_are_tensors_of_the_device() -> None:
    clipper = GradClipper(pairs(floats(3.0), floats(NAN)), 1.0)
    for _ in range(2):
        for counter in clipper.counters().values():
            assert (counter.dtype, counter.shape) == (torch.int64, ())
            assert counter.device.type == "cpu"
        clipper.clip_()


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_sparse_and_expanded_gradients(policy: Any) -> None:
    places = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(places, floats(3.0, 1.0, 3.0), (4,), check_invariants=True)
    expanded = floats(6.0).expand(3)
    params = parameters(sparse, expanded)
    stats = GradClipper(params, 1.0, nonfinite=policy).clip_()
    norm = math.sqrt(9 + 16 + 3 * 36)
    assert stats.total_norm.item() == pytest.approx(norm, rel=1e-6)
    first, second = grads_of(params)
    expected = pytest.approx([3 / norm, 0.0, 4 / norm, 0.0], rel=2e-6)
    assert first.to_dense().tolist() == expected
    assert second.tolist() == pytest.approx([6 / norm] * 3, rel=2e-6)
