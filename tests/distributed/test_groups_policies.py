"""What ranks decide together, and what one rank's trouble means to the others."""

import copy
import itertools
import math
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastclip import GradClipper
from fastclip.rules import AGC, AdaGC, MaxNorm
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
        assert stats["skipped"] == (policy in ("skip", "error"))
        assert stats["found_inf"] == (policy != "zero")
        unchanged = policy in ("skip", "error")
        for name, values in after.items():
            assert torch.equal(values.nan_to_num(), before[name].nan_to_num()) == unchanged
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
    """Three steps of which the second has a NaN on rank 1; what moved."""
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
    for seen, counted, scale, _ in (*fused, *foreach):
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


def in_trouble(kind: str) -> Any:
    """Rank 1 cannot measure at the second of three steps; what the calls raised."""
    calls = itertools.count()

    def schedule(step: int) -> float:
        return math.nan if (kind, next(calls), dist.get_rank()) == ("schedule", 1, 1) else 0.5

    own = splits.parameters(SPLIT)
    if kind == "frozen" and dist.get_rank() == 1:
        own["w1"].requires_grad_(False)
    model = nn.ParameterDict(own)
    for name, value in own.items():
        model[name] = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = GradClipper(model, schedule, **splits.grouped(SPLIT))
    raised = []
    for step in range(3):
        splits.assign(SPLIT, dict(model.items()), splits.gradients(step))
        if (step, dist.get_rank()) == (1, 1):
            if kind == "overlap":
                model["w1"].grad = torch.ones(20).as_strided((6, 8), (1, 1))
            elif kind == "new":
                model["new"] = nn.Parameter(torch.ones(2))
                model["new"].grad = torch.ones(2)
            elif kind == "frozen":
                model["w1"].requires_grad_(True)
        elif kind == "frozen" and dist.get_rank() == 1:
            model["w1"].grad = None
        try:
            if kind == "scaler" and (step, dist.get_rank()) == (1, 1):
                clipper.step(optimizer, torch.amp.GradScaler("cpu"))  # has scaled no loss yet
            else:
                clipper.step(optimizer)
            raised.append("")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
        if "new" in model:
            del model["new"]
        if kind == "frozen" and dist.get_rank() == 1:
            model["w1"].grad = None
            model["w1"].requires_grad_(False)
    return raised, int(clipper.counters()["steps"])


BUILD_NEW = (
    "a GradClipper with a process_group keeps to the parameters that required a gradient when it "
    "was built (for others, build a new GradClipper on all ranks)"
)
ELSEWHERE = (
    "RuntimeError: rank 1 could not measure its gradients, and raises the error itself. No "
    "gradient has been changed"
)
TROUBLE = {
    "overlap": "RuntimeError: gradient 'w1' has elements that share memory",
    "schedule": "ValueError: max_norm at step 1 must be",
    "scaler": "RuntimeError: the scaler has not scaled a loss yet",
    "new": f"RuntimeError: gradient 'new' is of a parameter that is new: {BUILD_NEW}",
    "frozen": f"RuntimeError: gradient 'w1' is of a parameter that is new: {BUILD_NEW}",
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_trouble_on_one_rank_is_an_error_on_all_and_the_next_step_works(
    ranks: Pool, kind: str
) -> None:
    (others, counted), (own, _) = ranks.run(2, in_trouble, kind)
    assert [others[0], others[2], own[0], own[2]] == [""] * 4
    assert own[1].startswith(TROUBLE[kind])
    if kind in ("new", "frozen"):
        assert others[1].startswith(f"RuntimeError: {BUILD_NEW}, but rank 1 has others than rank 0")
    else:
        assert others[1] == ELSEWHERE
    assert counted == 2


def trouble_in_a_later_group() -> str:
    """Rank 1's trouble reaches ranks that it shares no group with."""
    split = SPLITS["tensor-parallel-pipeline"]
    own = splits.parameters(split)
    splits.assign(split, own, splits.gradients(0))
    clipper = GradClipper(own.items(), 0.5, **splits.grouped(split))
    if dist.get_rank() == 1:
        own["w0"].grad = torch.ones(20).as_strided((4, 6), (1, 1))
    try:
        clipper.clip_()
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_next_group_hears_of_trouble(ranks: Pool) -> None:
    first, own, second, third = ranks.run(4, trouble_in_a_later_group)
    assert own.startswith("gradient 'w0' has elements that share memory")
    assert {first, third} == {ELSEWHERE.removeprefix("RuntimeError: ")}
    assert second == first


def left_alone() -> tuple[str, float]:
    clipper, _ = prepared(0.0)
    clipper.clip_()
    if dist.get_rank() == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        clipper.clip_()
    return str(error.value), time.monotonic() - start


def test_a_rank_that_dies_is_an_error_on_the_others(mortal_ranks: Pool) -> None:
    message, seconds = mortal_ranks.run(2, left_alone, timeout=3, dying=[1])[0]
    assert message.startswith("combining the gradient statistics of ranks 0, 1 failed: ")
    assert seconds < 5


def copied() -> tuple[str, list[str]]:
    clipper, _ = prepared(0.0)
    raised = []
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError) as error:
            attempt(clipper)
        raised.append(str(error.value))
    return repr(clipper), raised


def test_what_a_clipper_says_of_itself(ranks: Pool) -> None:
    for said, raised in ranks.run(2, copied):
        assert said == (
            "GradClipper(3 parameters, rule=MaxNorm(max_norm=0.5), norm_type=2.0, "
            "nonfinite='skip', process_group=<ranks 0, 1>)"
        )
        assert len(set(raised)) == 1
        assert raised[0] == (
            "a GradClipper with a process_group can be neither pickled nor copied: the group is of "
            "this process. Build a new one, and give it the state_dict of this one"
        )


def built(kind: str) -> str:
    """What building a clipper raises, where rank 1 asks for something wrong."""
    own: Any = list(splits.parameters(SPLIT).items())
    options: dict[str, Any] = {"rule": MaxNorm(1.0)} | splits.grouped(SPLIT)
    if kind == "AGC":
        options["rule"] = AGC()
    elif dist.get_rank() == 1:
        if kind == "max_norm":
            options["rule"] = MaxNorm(2.0)
        elif kind == "norm_type":
            options["norm_type"] = 1
        elif kind == "policy":
            options["nonfinite"] = "zero"
        elif kind == "positions":
            own = [value for _, value in own]
        elif kind == "counts":
            options["counts"] = lambda name, parameter: "yes"
        elif kind == "twice":
            own.append(("w1", torch.ones(1, requires_grad=True)))
    try:
        GradClipper(own, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


ALIKE = "ValueError: the GradClippers of a process group must be alike: that of rank 0 has "
COULD_NOT = "RuntimeError: rank 1 could not build its GradClipper: "
BUILT = {
    "max_norm": (
        ALIKE + "MaxNorm(max_norm=1.0), norm_type=2, nonfinite='skip', that of rank 1 ",
        "",
    ),
    "norm_type": (ALIKE, ""),
    "policy": (ALIKE, ""),
    "positions": (COULD_NOT, "ValueError: process_group combines parameters by their names"),
    "counts": (COULD_NOT, "TypeError: counts must return True or False, got 'yes' for 'w1'"),
    "twice": (COULD_NOT, "ValueError: the name 'w1' comes more than once"),
    "AGC": ("TypeError: AGC looks at whole gradients and parameters", ""),
}


@pytest.mark.parametrize("kind", BUILT)
def test_what_is_wrong_at_construction_is_raised_on_all_ranks(ranks: Pool, kind: str) -> None:
    others, own = BUILT[kind]
    first, second = ranks.run(2, built, kind)
    assert first.startswith(others)
    assert second.startswith(own or others)
    if own:
        assert own in first


def test_counts_needs_a_group() -> None:
    with pytest.raises(TypeError, match="counts is for the parameters of a process_group"):
        GradClipper([("w", torch.ones(1))], counts=lambda name, parameter: True)


class Halving:
    """A rule of one's own, per tensor: it sees norms, and no tensor."""

    per_tensor = True

    def init(self, n: int, device: torch.device) -> State:
        return {"last": torch.zeros(n, dtype=torch.float64, device=device)}

    def decide(self, measured: Measured, state: State) -> Decision:
        assert (measured.parameters, measured.gradients) == ((), ())
        half = torch.full_like(measured.norms, 0.5)
        return Decision(half, half, {"last": measured.norms})


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
