"""A rule of one's own: what it returns is looked at before anything is written."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip import GradClipper
from fastclip.rules import AGC, Decision, Measured, State
from tests import training
from tests.making import floats, grads_of, parameters, snapshot, unchanged

F64 = torch.float64
NAN, INF = math.nan, math.inf


class Own:
    """Returns what `answer` makes of a right decision: coefficients of 0.5."""

    def __init__(self, answer: Callable[[Decision], Any], per_tensor: bool = False) -> None:
        self.answer = answer
        self.per_tensor = per_tensor

    def init(self, n: int, device: torch.device) -> State:
        shape = (n,) if self.per_tensor else ()
        return {"mean": torch.zeros(shape, dtype=F64, device=device)}

    def decide(self, measured: Measured, state: State) -> Any:
        like = measured.norms if self.per_tensor else measured.total
        right = Decision(like * 0 + 0.5, like * 0 + INF, {"mean": state["mean"] + 1})
        return self.answer(right)


def half(number: int) -> Tensor:
    return torch.full((number,), 0.5, dtype=F64)


WRONG: dict[str, tuple[Callable[[Decision], Any], bool, type[Exception], str]] = {
    "tuple": (tuple, False, TypeError, r"Own\.decide must return a Decision, got tuple"),
    "nothing": (lambda d: None, False, TypeError, "got NoneType"),
    "float": (
        lambda d: d._replace(coef=0.5),  # type: ignore[arg-type]
        False,
        TypeError,
        "coef of Own .*float64, got float",
    ),
    "float32": (
        lambda d: d._replace(coef=d.coef.float()),
        False,
        TypeError,
        r"coef of Own must be a Tensor of torch\.float64, got one of torch\.float32",
    ),
    "per-tensor-coef": (
        lambda d: d._replace(coef=half(2)),
        False,
        ValueError,
        r"coef of Own must have shape \(\) on cpu, got \(2,\)",
    ),
    "one-coef": (
        lambda d: d._replace(coef=half(1)[0]),
        True,
        ValueError,
        r"shape \(2,\).*got \(\)",
    ),
    "threshold": (
        lambda d: d._replace(threshold=half(3)),
        True,
        ValueError,
        r"threshold of Own.*\(2,\).*\(3,\)",
    ),
    "device": (
        lambda d: d._replace(coef=d.coef.to("meta")),
        False,
        ValueError,
        "on cpu, got .* on meta",
    ),
    "no-dict": (
        lambda d: d._replace(state=None),  # type: ignore[arg-type]
        False,
        TypeError,
        "state of Own.*got NoneType",
    ),
    "keys": (
        lambda d: d._replace(state={"means": d.coef}),
        False,
        ValueError,
        r"state of Own must have the keys \['mean'\], got \['means'\]",
    ),
    "state-dtype": (
        lambda d: d._replace(state={"mean": d.coef.float()}),
        False,
        TypeError,
        "state 'mean' of Own",
    ),
    "state-shape": (
        lambda d: d._replace(state={"mean": half(2)}),
        False,
        ValueError,
        "state 'mean' of Own",
    ),
    "units-of-a-global-rule": (
        lambda d: d._replace(units=[half(2), half(1)]),
        False,
        ValueError,
        "units of Own must be those of 2 gradients.*got 2 with False",
    ),
    "units-missing": (
        lambda d: d._replace(units=[half(2)]),
        True,
        ValueError,
        "units of Own.*got 1 with True",
    ),
    "units-shape": (
        lambda d: d._replace(units=[half(2), half(3)]),
        True,
        ValueError,
        r"units of gradient 1 of Own.*\(1,\).*\(3,\)",
    ),
}


def grads(bad: float = 4.0) -> list[Tensor]:
    return [torch.tensor([[3.0], [bad]]), floats(12.0, 5.0)]


@pytest.mark.parametrize("policy", training.POLICIES)
@pytest.mark.parametrize(("answer", "each", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_decision_is_refused(
    answer: Any, each: bool, error: type[Exception], message: str, policy: Any
) -> None:
    params = parameters(*grads(NAN if policy == "zero" else 4.0))
    before = snapshot(grads_of(params))
    clipper = GradClipper(params, rule=Own(answer, each), nonfinite=policy)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=True)
    for call in (clipper.measure, clipper.clip_, lambda: clipper.step(optimizer)):
        with pytest.raises(error, match=message):
            call()
    assert unchanged(grads_of(params), before)
    assert all(not p.detach().any() for p in params)
    assert training.counted(clipper) == (0, 0, 0, 0)


def with_units(decision: Decision) -> Decision:
    return decision._replace(units=[half(2), half(1)])


@pytest.mark.parametrize(
    ("answer", "each"), [(lambda d: d, False), (lambda d: d, True), (with_units, True)]
)
def test_a_right_one_is_taken(answer: Any, each: bool) -> None:
    params = parameters(*grads())
    GradClipper(params, rule=Own(answer, each)).clip_()
    assert unchanged(grads_of(params), [torch.tensor([[1.5], [2.0]]), floats(6.0, 2.5)])


def spoil(bad: float, where: str) -> Callable[[Decision], Decision]:
    def answer(decision: Decision) -> Decision:
        if where == "units":
            return decision._replace(units=[torch.tensor([0.5, bad], dtype=F64), half(1)])
        coef = decision.coef.clone()
        coef.view(-1)[-1] = bad
        return decision._replace(coef=coef)

    return answer


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", ["coef", "coefs", "units"])
def test_a_coefficient_that_is_not_finite_skips_the_step(
    where: str, bad: float, fused: bool
) -> None:
    params = parameters(*grads())
    before = snapshot(grads_of(params))
    rule = Own(spoil(bad, where), per_tensor=where != "coef")
    clipper = GradClipper(params, rule=rule)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    for stats in (clipper.measure(), clipper.clip_(), clipper.step(optimizer)):
        assert (stats.skipped.item(), stats.found_inf.item()) == (True, 1.0)
        assert (stats.clipped.item(), stats.nonfinite_count.item()) == (False, 0)
        assert stats.coef.unique().tolist() == [1.0]
    assert unchanged(grads_of(params), before)
    assert all(not p.detach().any() for p in params)
    assert training.counted(clipper) == (2, 0, 2, 2)
    (state,) = [*clipper.state_dict()["state"].values()][:1]
    assert (state["mean"] if isinstance(state, dict) else state).item() == 0.0


def test_error_names_the_rule_whose_coefficient_is_not_finite() -> None:
    params = parameters(*grads())
    before = snapshot(grads_of(params))
    clipper = GradClipper(params, rule=Own(spoil(NAN, "coef")), nonfinite="error")
    with pytest.raises(RuntimeError, match="Own gave a coefficient that is not finite"):
        clipper.clip_()
    assert clipper.measure().skipped
    assert unchanged(grads_of(params), before)
    assert training.counted(clipper) == (0, 0, 0, 0)


def test_a_gradient_that_a_rule_cannot_take_is_refused_before_elements_become_zero() -> None:
    params = parameters(floats(NAN, 1.0), torch.tensor([[INF, 2.0]]).expand(3, 2))
    before = snapshot(grads_of(params))
    clipper = GradClipper(params, rule=AGC(), nonfinite="zero")
    with pytest.raises(TypeError, match="gradient at position 1 is stored in shape"):
        clipper.clip_()
    assert unchanged(grads_of(params), before)
