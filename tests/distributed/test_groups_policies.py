"""What ranks decide together: policies, scalers, optimizers, rules of one's own, state."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import GradClipper, passes
from fastclip.gradients import Gradients
from fastclip.rules import AdaGC
from fastclip.rules.contract import Decision, Measured, State
from tests.distributed import splits
from tests.distributed.ranks import Pool
from tests.distributed.splits import SPLITS

SPLIT = SPLITS["pipeline"]  # rank 1 has a copy of `embed` that rank 0 counts


def prepared(bad: float, **options: Any) -> tuple[GradClipper, dict[str, Tensor]]:
    """A clipper of the pipeline; the copy of `embed` on rank 1 has a bad element."""
    own = splits.parameters(SPLIT)
    splits.assign(SPLIT, own, splits.gradients(0))
    if dist.get_rank() == 1:
        gradient(own["embed"]).view(-1)[5] = bad
    return GradClipper(own.items(), 0.5, **options, **splits.grouped(SPLIT)), own


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def kept(own: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient(parameter).clone() for name, parameter in own.items()}


def clipped_with(policy: str, bad: float) -> Any:
    clipper, own = prepared(bad, nonfinite=policy)
    before = kept(own)
    looked = clipper.measure()
    assert all(
        torch.equal(gradient(own[n]).nan_to_num(), g.nan_to_num()) for n, g in before.items()
    )
    error = ""
    try:
        stats = clipper.clip_()
    except RuntimeError as raised:
        stats, error = looked, str(raised)
    ranks = [(each.rank, each.nan, each.inf, each.nonfinite) for each in stats.by_rank()]
    return stats.as_dict(), looked.as_dict(), ranks, error, before, kept(own)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["skip", "zero", "error", "propagate"])
def test_a_bad_copy_that_does_not_count_is_seen_by_all(
    ranks: Pool, policy: str, bad: float
) -> None:
    answers = ranks.run(2, clipped_with, policy, bad)
    nan, inf = float(math.isnan(bad)), float(math.isinf(bad))
    for stats, looked, by_rank, error, before, after in answers:
        assert stats["names"] == ["embed", "w0", "norm0", "w1", "norm1"]
        assert (stats["nan_count"], stats["inf_count"]) == ([nan, 0, 0, 0, 0], [inf, 0, 0, 0, 0])
        assert by_rank == [(0, 0, 0, []), (1, nan, inf, ["embed"])]
        unchanged = policy != "propagate"  # but for what has been zeroed
        assert stats["skipped"] == unchanged  # under "zero": rank 0 cannot know which element
        assert stats["found_inf"] == 1
        for name, values in after.items():
            known = [each.nan_to_num(0.0, 0.0, 0.0) for each in (values, before[name])]
            assert torch.equal(*known) == unchanged
        if policy == "error":
            assert (
                f"gradient 'embed' ({nan:.0f} NaN, {inf:.0f} inf; on rank 1). No gradient" in error
            )
        else:
            assert error == ""
            assert str(looked) == str(stats)  # where NaN is equal to NaN
    assert str(answers[0][0]) == str(answers[1][0])
    if policy == "zero":
        grads = splits.gradients(0)
        names = ("embed", "w0", "norm0", "w1", "norm1")
        total = math.sqrt(sum(grads[name].double().square().sum().item() for name in names))
        assert answers[0][0]["total_norm"] == pytest.approx(total, rel=1e-6)
        assert answers[1][5]["embed"].view(-1)[5] == 0


def stepped(kind: str, scaled: bool) -> Any:
    """Three steps of which the second has a NaN on rank 1; what moved, and how often gradients were
    rescaled by a pass of their own."""
    written: list[Tensor] = []
    scale_ = passes.scale_

    def recorded(found: Gradients, coef: Tensor) -> None:
        written.append(coef)
        scale_(found, coef)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "scale_", recorded)
        return *_stepped(kind, scaled), len(written)


def _stepped(kind: str, scaled: bool) -> Any:
    own = splits.parameters(SPLIT)
    split = [[value for name, value in own.items() if name != "norm0"], []]
    if "norm0" in own:
        split[1].append(own["norm0"])
    fused = kind == "fused"
    optimizers = [
        torch.optim.AdamW(each, lr=0.1, fused=fused or None, foreach=None if fused else True)
        for each in split
        if each
    ]
    clipper = GradClipper(own.items(), 0.5, **splits.grouped(SPLIT))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    seen = []
    for step in range(3):
        splits.assign(SPLIT, own, splits.gradients(step))
        if step == 1 and dist.get_rank() == 1:
            gradient(own["w1"])[0] = math.nan
        if scaler is not None:
            scaler.scale(torch.ones(()))
            for parameter in own.values():
                gradient(parameter).mul_(8.0)
        before = {name: value.detach().clone() for name, value in own.items()}
        stats = clipper.step(optimizers, scaler)
        if scaler is not None:
            scaler.update()
        moved = {name: not torch.equal(value, before[name]) for name, value in own.items()}
        seen.append((stats.total_norm.item(), stats.coef.item(), bool(stats.skipped), moved))
    scale = None if scaler is None else scaler.get_scale()
    counted = {name: int(value) for name, value in clipper.counters().items()}
    return seen, counted, scale, {name: value.detach() for name, value in own.items()}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_all_step_or_none(ranks: Pool, scaled: bool) -> None:
    fused = ranks.run(2, stepped, "fused", scaled)
    foreach = ranks.run(2, stepped, "foreach", scaled)
    assert [answer[4] for answer in (*fused, *foreach)] == [0, 0, 3, 3]
    for seen, counted, scale, *_ in (*fused, *foreach):
        assert [skipped for _, _, skipped, _ in seen] == [False, True, False]
        assert [set(moved.values()) for *_, moved in seen] == [{True}, {False}, {True}]
        assert counted == {"steps": 3, "clipped": 2, "skipped": 1, "consecutive_skips": 0}
        assert scale == (4.0 if scaled else None)
        assert str([each[:3] for each in seen]) == str([each[:3] for each in fused[0][0]])
    for ours, theirs in zip(fused, foreach, strict=True):
        torch.testing.assert_close(ours[3], theirs[3], rtol=1e-6, atol=1e-7)
    assert torch.equal(fused[0][3]["embed"], fused[1][3]["embed"])  # the tied copies


def scaled_others() -> Any:
    """A scaler's optimizer on rank 0 has a gradient that is not the clipper's, with an inf."""
    own = splits.parameters(SPLIT)
    splits.assign(SPLIT, own, splits.gradients(0))
    parameters = list(own.values())
    if dist.get_rank() == 0:
        other = torch.zeros(2, requires_grad=True)
        other.grad = torch.tensor([1.0, math.inf])
        parameters.append(other)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clipper = GradClipper(own.items(), 0.5, **splits.grouped(SPLIT))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = kept(own)
    stats = clipper.step(optimizer, scaler)
    scaler.update()
    unchanged = all(torch.equal(gradient(own[name]), value) for name, value in before.items())
    return bool(stats.skipped), int(stats.nonfinite_count), scaler.get_scale(), unchanged


def test_what_only_the_scaler_checks_is_agreed_on(ranks: Pool) -> None:
    assert ranks.run(2, scaled_others) == [(True, 0, 4.0, True)] * 2


class Halving:
    """A rule of one's own, per tensor: it sees norms, and no tensor."""

    per_tensor = True

    def init(self, n: int, device: torch.device) -> State:
        return {"last": torch.zeros(n, dtype=torch.float64, device=device)}

    def decide(self, measured: Measured, state: State) -> Decision:
        assert (measured.parameters, measured.gradients) == ((), ())
        half = torch.full_like(measured.norms, 0.5)
        return Decision(half, half, {"last": measured.norms})


class Units(Halving):
    """Scales units of tensors that it has not seen."""

    def decide(self, measured: Measured, state: State) -> Decision:
        return super().decide(measured, state)._replace(units=[])


def own_units() -> str:
    own = splits.parameters(SPLIT)
    clipper = GradClipper(own.items(), rule=Units(), **splits.grouped(SPLIT))
    splits.assign(SPLIT, own, splits.gradients(0))
    with pytest.raises(ValueError, match="Units gave units") as error:
        clipper.clip_()
    return str(error.value)


def test_a_rule_of_ones_own_cannot_scale_units(ranks: Pool) -> None:
    for said in ranks.run(2, own_units):
        assert said == (
            "Units gave units, of which it has seen none: with a process_group, rules get norms "
            "and no tensors"
        )


def own_rule() -> Any:
    own = splits.parameters(SPLIT)
    clipper = GradClipper(own.items(), rule=Halving(), **splits.grouped(SPLIT))
    splits.assign(SPLIT, own, splits.gradients(0))
    before = kept(own)
    clipper.clip_()
    halved = all(torch.equal(gradient(own[n]), g / 2) for n, g in before.items())
    return halved, clipper.state_dict()["state"]


def test_a_rule_of_ones_own_sees_the_rows_of_all_ranks(ranks: Pool) -> None:
    grads = splits.gradients(0)
    for halved, state in ranks.run(2, own_rule):
        assert halved
        assert list(state) == ["embed", "w0", "norm0", "w1", "norm1"]
        for name, parts in state.items():
            assert parts["last"].item() == pytest.approx(
                grads[name].double().norm().item(), rel=1e-6
            )


def resumed() -> Any:
    own = splits.parameters(SPLIT)
    groups = splits.grouped(SPLIT)
    rule = AdaGC(warmup=1, max_norm=0.5)
    first, second = (GradClipper(own.items(), rule=rule, **groups) for _ in range(2))
    answers = []
    for step in range(4):
        splits.assign(SPLIT, own, splits.gradients(step))
        answers.append(first.measure().as_dict())
        first.clip_()
        if step == 1:
            second.load_state_dict(first.state_dict())
        elif step > 1:
            splits.assign(SPLIT, own, splits.gradients(step))
            assert second.measure().as_dict() == answers[-1]
            second.clip_()
    return answers[-1], first.state_dict()["state"], second.state_dict()["state"]


def test_a_state_goes_on_by_the_names_of_all_ranks(ranks: Pool) -> None:
    for stats, first, second in ranks.run(2, resumed):
        assert list(first) == list(second) == stats["names"]
        torch.testing.assert_close(first, second, rtol=0, atol=0)
