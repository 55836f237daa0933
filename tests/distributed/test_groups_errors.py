"""What one rank's trouble means to the others, in a step and when clippers are built."""

import copy
import itertools
import math
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastclip import GradClipper
from fastclip.distributed import combine
from fastclip.rules import AGC, MaxNorm
from tests.distributed import splits
from tests.distributed.ranks import Pool
from tests.distributed.splits import SPLITS

SPLIT = SPLITS["pipeline"]


def prepared() -> GradClipper:
    own = splits.parameters(SPLIT)
    splits.assign(SPLIT, own, splits.gradients(0))
    return GradClipper(own.items(), 0.5, **splits.grouped(SPLIT))


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
    "FailedElsewhere: rank 1 could not measure its gradients, and raises the error itself. No "
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
    assert {first, third} == {ELSEWHERE.removeprefix("FailedElsewhere: ")}
    assert second == first


def left_alone() -> str:
    clipper = prepared()
    clipper.clip_()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        clipper.clip_()
    return str(error.value)


def test_a_rank_that_dies_is_an_error_on_the_others(mortal_ranks: Pool) -> None:
    message = mortal_ranks.run(2, left_alone, timeout=5, dying=[1], seconds=30)[0]
    assert message.startswith("combining the gradient statistics of ranks 0, 1 failed: ")
    assert "Each of them has to make the same call" in message


def copied() -> tuple[str, list[str]]:
    clipper = prepared()
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
        elif kind == "parameters":
            own = [("w1", 3)]
        elif kind == "unknown-policy":
            options["nonfinite"] = "ignore"
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
    "parameters": (COULD_NOT, "TypeError: entry 0 of parameters must be a Tensor"),
    "unknown-policy": (COULD_NOT, "ValueError: nonfinite must be one of"),
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


def test_what_is_overdue_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU headers are read in the next call, by every rank: none may keep one for later."""
    header = torch.tensor([[0.0, 7.0, 1.0], [2.0, 7.0, 1.0]], dtype=torch.float64)
    gathered = combine.Gathered((0, 1), torch.zeros(2, 1, 5), torch.zeros(2, 1), header)
    arrived = torch.Event("cpu")
    monkeypatch.setattr(combine, "_overdue", [combine._Overdue(gathered, arrived, "what")] * 2)
    with pytest.raises(RuntimeError, match="rank 1 could not measure"):
        combine.raise_overdue()
    combine.raise_overdue()
