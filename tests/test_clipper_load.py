"""A state is taken whole or not at all, wherever it was made."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip import GradClipper
from fastclip.rules import AdaGC, AutoClip, LogZ, Rule, ZClip
from tests import training

RULES: dict[str, Callable[[], Rule]] = {
    "AdaGC": lambda: AdaGC(warmup=2),
    "ZClip": lambda: ZClip(warmup=2),
    "LogZ": lambda: LogZ(warmup=2),
    "AutoClip": lambda: AutoClip(window=3),
}


def made(rule: Rule | None, max_norm: Any = None, dtype: Any = torch.float32) -> GradClipper:
    return GradClipper(
        [(name, nn.Parameter(torch.ones(2, dtype=dtype))) for name in "ab"], max_norm, rule=rule
    )


def advance(clipper: GradClipper, steps: int = 4, size: float = 1.0) -> list[Any]:
    decided = []
    for number in range(steps):
        for parameter in clipper._listing.read()[0]:
            parameter.grad = torch.full_like(parameter, size + number)
        stats = clipper.clip_()
        decided.append((stats.coef, stats.threshold, stats.total_norm))
    return decided


def changed(state: dict[str, Any], path: str, value: Any) -> Any:
    """The state with another value at a dotted path; with none where `value` is Ellipsis."""
    inner = state
    *keys, last = path.split(".") if path else [""]
    if not path:
        return value
    for key in keys:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return state


DAMAGED: dict[str, tuple[str, Any, str]] = {
    "no-mapping": ("", [1, 2], r"^the state of a GradClipper is a mapping, got list"),
    "counters": ("counters", None, r"^the counters must be a mapping, got NoneType"),
    "counter-missing": ("counters.skipped", ..., r"^the counters have no 'skipped'"),
    "steps-missing": ("counters.steps", ..., r"^the counters have no 'steps'"),
    "negative": ("counters.steps", -1, r"^the counter 'steps' must be .*, got -1"),
    "negative-tensor": ("counters.clipped", torch.tensor(-1), r"^the counter 'clipped' must be"),
    "float": ("counters.clipped", 2.0, r"^the counter 'clipped' must be .*, got 2\.0"),
    "float-tensor": ("counters.clipped", torch.tensor(2.0), r"^the counter 'clipped' must be"),
    "bool": ("counters.clipped", True, r"^the counter 'clipped' must be .*, got True"),
    "1-d": ("counters.skipped", torch.tensor([1]), r"^the counter 'skipped' must be"),
    "large": ("counters.skipped", 2**63, r"^the counter 'skipped' must be"),
    "word": ("counters.consecutive_skips", "3", r"^the counter 'consecutive_skips' must be"),
    "state": ("state", None, r"^the rule's state must be a mapping, got NoneType"),
}


def refused(rule: Rule, path: str, value: Any, match: str) -> None:
    clipper, other = made(rule), made(rule)
    advance(clipper)
    advance(other, 2)
    before = training.snapshot(other.state_dict())
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(changed(clipper.state_dict(), path, value))
    training.same(other.state_dict(), before)
    advance(other)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("path", "value", "match"), DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_damaged_changes_nothing(rule: str, path: str, value: Any, match: str) -> None:
    refused(RULES[rule](), path, value, match)


PARTS: dict[str, tuple[Any, str]] = {
    "missing": (..., r" has .*, where \w+ has .*"),
    "number": (1.0, r" \(of type float\).*, where "),
    "float32": (torch.tensor(1.0), r" \(torch.float32, shape \(\)\).*, where "),
    "int": (torch.tensor(1), r" \(torch.int64, shape \(\)\).*, where "),
    "shape": (torch.ones(7, dtype=torch.float64), r" \(torch.float64, shape \(7,\)\).*, where "),
}
FIRST = {"AdaGC": "b.gamma", "ZClip": "var", "LogZ": "mean", "AutoClip": "norms"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("value", "match"), PARTS.values(), ids=PARTS.keys())
def test_a_damaged_part(rule: str, value: Any, match: str) -> None:
    refused(RULES[rule](), f"state.{FIRST[rule]}", value, r"^the state" + "(?s:.)*" + match)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_part_that_is_not_finite(rule: str, bad: float) -> None:
    shape = (3,) if rule == "AutoClip" else ()
    value = torch.full(shape, bad, dtype=torch.float64)
    whose = ", of 'b'" if rule == "AdaGC" else ""
    key = FIRST[rule].split(".")[-1]
    match = f"^the state has a {key} that is not finite{whose}$"
    refused(RULES[rule](), f"state.{FIRST[rule]}", value, match)


def test_a_tensor_that_is_no_mapping() -> None:
    refused(AdaGC(), "state.b", [1.0], r"^the state of 'b' must be a mapping of tensors, got list")


def test_counters_that_went_through_json() -> None:
    clipper, other = made(None, 1.0), made(None, 1.0)
    advance(clipper)
    state = clipper.state_dict()
    counters = {name: int(value) for name, value in state["counters"].items()}
    other.load_state_dict(json.loads(json.dumps(state | {"counters": counters})))
    training.same(other.state_dict(), state)


@pytest.mark.parametrize("rule", RULES)
def test_inference_mode(rule: str) -> None:
    """A clipper that was made, or loaded, or that stepped in it goes on as another one."""
    first = made(RULES[rule]())
    advance(first)
    saved = first.state_dict()
    with torch.inference_mode():
        there = made(RULES[rule]())
        there.load_state_dict(saved)
        inner = first.state_dict()
    again = made(RULES[rule]())
    again.load_state_dict(inner)
    parameters = made(None)._listing
    for clipper in (there, again):
        clipper._listing = parameters  # parameters made in inference mode have no gradients
        training.same(advance(clipper), advance_from(saved, RULES[rule]()))
        assert clipper.counters()["steps"] == 8
        assert not any(tensor.is_inference() for tensor in leaves(clipper.state_dict()))


def advance_from(saved: dict[str, Any], rule: Rule) -> list[Any]:
    clipper = made(rule)
    clipper.load_state_dict(saved)
    return advance(clipper)


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    return [tree] if isinstance(tree, Tensor) else []


def test_a_clipper_made_in_inference_mode_counts() -> None:
    with torch.inference_mode():
        clipper = GradClipper([], 1.0)
    assert clipper.clip_().skipped.item() is False
    assert clipper.counters()["steps"] == 1


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_is_that_of_its_step(dtype: torch.dtype, policy: Any) -> None:
    """Not the tensor that the user goes on to change."""
    limit = torch.tensor(2.0, dtype=dtype)
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    stats = GradClipper([parameter], limit, nonfinite=policy).clip_()
    limit.fill_(3.0)
    assert stats.threshold.item() == 2.0
    stats.threshold.fill_(7.0)
    assert limit.item() == 3.0


def test_loading_many_names_takes_time_in_proportion() -> None:
    """Each name is looked up, not compared with all others."""

    class Name(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

    names = [Name(number) for number in range(500)]
    clipper = GradClipper([(name, nn.Parameter(torch.ones(1))) for name in names], rule=AdaGC())
    for parameter in clipper._listing.read()[0]:
        parameter.grad = torch.ones(1)
    clipper.clip_()
    saved = clipper.state_dict()
    fresh = {str(name): value for name, value in saved["state"].items()}
    Name.compared = 0
    clipper.load_state_dict(saved | {"state": fresh})
    assert Name.compared < 10 * len(names)
