"""GradClipper over process groups, against one process that holds everything."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import GradClipper
from fastclip.rules import AdaGC, MaxNorm, ZClip
from tests.distributed import splits
from tests.distributed.ranks import Pool
from tests.distributed.splits import SPLITS, Split

NAMES = list(SPLITS)
RULES: dict[str, Any] = {
    "MaxNorm": lambda: MaxNorm(0.5),
    "ZClip": lambda: ZClip(z=0.5, warmup=2, max_norm=2.0),
    "AdaGC": lambda: AdaGC(ratio=1.01, warmup=1, max_norm=0.5),
}
STEPS = 4


def whole(split: Split, step: int) -> dict[str, Tensor]:
    """The gradients of the model that is split; one of them is missing at step 2."""
    grads = {name: grad for name, grad in splits.gradients(step).items() if name in split.names()}
    if step == 2:
        del grads[split.names()[-1]]
    return grads


def several_steps(name: str, rule: str, p: float) -> dict[str, Any]:
    """Steps of a clipper with groups and of one with everything; and how far they differ."""
    split = SPLITS[name]
    own = splits.parameters(split)
    every = {each: torch.zeros(splits.SHAPES[each], requires_grad=True) for each in split.names()}
    clipper = GradClipper(own.items(), rule=RULES[rule](), norm_type=p, **splits.grouped(split))
    single = GradClipper(every.items(), rule=RULES[rule](), norm_type=p)
    rows: list[Any] = []
    apart = 0.0
    for step in range(STEPS):
        grads = whole(split, step)
        splits.assign(split, own, grads)
        for each, parameter in every.items():
            parameter.grad = grads[each].clone() if each in grads else None
        stats, expected = clipper.clip_(), single.clip_()
        for part in split.ranks[dist.get_rank()]:
            mine, theirs = own[part.name].grad, every[part.name].grad
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                apart = max(
                    apart,
                    ((mine - theirs[part.rows]) / grads[part.name][part.rows]).abs().max().item(),
                )
        present = [each in grads for each in stats.names]
        ours, wanted = stats.as_dict(), expected.as_dict()
        for key in ("norms", "max_abs", "zero_count", "numel"):
            ours[key] = [value for value, there in zip(ours[key], present, strict=True) if there]
        if stats.coef.dim():
            for key in ("coef", "threshold"):
                ours[key] = [v for v, there in zip(ours[key], present, strict=True) if there]
        del ours["nan_count"], wanted["nan_count"], ours["inf_count"], wanted["inf_count"]
        names = ours.pop("names")
        assert [each for each in names if each in grads] == wanted.pop("names")
        rows.append((ours, wanted, names))
    return {
        "rows": rows,
        "apart": apart,
        "state": clipper.state_dict(),
        "single": single.state_dict(),
    }


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_one_process(ranks: Pool, name: str, rule: str, p: float) -> None:
    split = SPLITS[name]
    answers = ranks.run(split.size, several_steps, name, rule, p)
    for answer in answers:
        for row, (ours, wanted, names) in enumerate(answer["rows"]):
            assert names == split.names()
            for key, value in wanted.items():
                assert ours[key] == pytest.approx(value, rel=2e-6), f"{key} of step {row}"
            assert ours == answers[0]["rows"][row][0]  # every bit
        assert answer["apart"] < 1e-6
        for part in ("counters", "state"):
            ours, wanted = answer["state"][part], answer["single"][part]
            torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=0)
