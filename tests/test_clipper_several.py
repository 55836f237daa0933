"""Which optimizers a step takes, and several of them under one norm."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from fastclip import GradClipper
from tests import training
from tests.forbidding import MODES
from tests.training import Parameters

MAX_NORM = 5.0
STEPS = 20
BAD = {0: math.nan, 8: math.inf, 9: math.nan}
PAIRS = [
    ("adam-fused", "momentum-fused"),
    ("adam-fused", "momentum-foreach"),
    ("adam-foreach", "adamw-fused"),
    ("rmsprop-foreach", "sgd-loop"),
    ("adamw-fused", "dampening-fused"),  # whose first step the flag cannot undo
]


def two(names: tuple[str, str], params: Parameters) -> list[Optimizer]:
    keys = list(params)
    parts = [{key: params[key] for key in part} for part in (keys[:2], keys[2:])]
    return [training.optimizer(name, part) for name, part in zip(names, parts, strict=True)]


def states(params: Parameters, optimizers: list[Optimizer]) -> Any:
    state = [training.values(params), *(each.state_dict()["state"] for each in optimizers)]
    return training.snapshot(state)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("rule", ["MaxNorm", "AdaGC"])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_one_norm_and_all_or_none(names: tuple[str, str], rule: str, scaled: bool) -> None:
    ours, theirs = training.parameters(), training.parameters()
    our_two = two(names, ours)
    foreach = tuple(name.replace("fused", "foreach") for name in names)
    their_two = two(foreach, theirs)  # type: ignore[arg-type]
    clipper, plain = training.clipper(ours, rule), training.plain_rule(rule)
    scaler = training.make_scaler()
    for step, grads in enumerate(training.stream(STEPS, bad=BAD)):
        if scaled:
            training.backward(ours, grads, scaler)
        else:
            training.assign(ours, grads)
        before = states(ours, our_two)
        stats = clipper.step(our_two, scaler if scaled else None)
        if scaled:
            scaler.update()
        assert bool(stats.skipped) == (step in BAD)
        if step in BAD and step > 0:  # a fused optimizer makes its state in a skipped first step
            training.same(states(ours, our_two), before, f"step {step}")
        if step in BAD:
            continue
        assert stats.total_norm.item() == pytest.approx(training.total(grads), rel=1e-6)
        training.assign(theirs, grads)
        plain.clip_(theirs.values())
        for each in their_two:
            each.step()
        training.near(ours, theirs, 1e-6, f"step {step}")
        for our, their in zip(our_two, their_two, strict=True):
            training.near(training.moments(our), training.moments(their), 1e-6, f"step {step}")
    assert training.counted(clipper)[::2] == (STEPS, len(BAD))


@pytest.mark.parametrize("mode", MODES)
def test_fused_ones_read_nothing_on_the_host(mode: str) -> None:
    params = training.parameters()
    optimizers = two(("adam-fused", "adagrad-fused"), params)
    clipper = GradClipper(params.items(), MAX_NORM)
    first, *rest = training.stream(6, bad={3: math.nan})
    training.assign(params, first)
    clipper.step(optimizers)
    for grads in rest:
        training.assign(params, grads)
        with MODES[mode]():
            clipper.step(optimizers)


def test_the_flag_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = training.parameters()
    optimizers = two(("momentum-foreach", "sgd-loop"), params)
    clipper = GradClipper(params.items(), MAX_NORM)
    reads = itertools.count()
    item = Tensor.item

    def counting(tensor: Tensor) -> Any:
        next(reads)
        return item(tensor)

    training.assign(params, training.stream(1)[0])
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "item", counting)
        clipper.step(optimizers)
    assert next(reads) == 1


@pytest.mark.parametrize(
    "groups", [["a"], ["a", "ab"]], ids=["a-parameter-of-neither", "a-parameter-of-both"]
)
def test_what_is_not_exactly_the_clippers_is_clipped_once(groups: list[str]) -> None:
    """Where optimizers cannot be handed the coefficient: it would be lost, or applied twice."""
    params = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    optimizers = [
        torch.optim.SGD([params[name] for name in group], lr=1.0, fused=True) for group in groups
    ]
    for parameter in params.values():
        parameter.grad = torch.tensor([3.0, 4.0])
    GradClipper(params.items(), 1.0).step(optimizers)
    clipped = torch.tensor([0.6, 0.8]) / math.sqrt(2)
    for name, parameter in params.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, clipped)
        times = sum(name in group for group in groups)
        torch.testing.assert_close(parameter.detach(), -times * clipped)


def sgd() -> Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def test_what_cannot_be_stepped_is_refused() -> None:
    made = sgd()
    clipper = GradClipper([torch.ones(1)])
    with pytest.raises(TypeError, match="an optimizer or several, got float"):
        clipper.step(1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an optimizer or several, got Tensor"):
        clipper.step([made, torch.ones(1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"an optimizer or several, got \[\]"):
        clipper.step([])
    with pytest.raises(ValueError, match="comes twice among the 3"):
        clipper.step([made, sgd(), made])
    with pytest.raises(TypeError, match=r"got the optimizer SGD: .*step\(\[first, second\]\)"):
        clipper.step(made, sgd())  # type: ignore[arg-type]
    assert training.counted(clipper)[0] == 0


class Keyword(torch.optim.SGD):
    def step(self, *, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Keyword])
def test_a_step_that_needs_a_closure_is_refused(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    closing = kind([parameter], lr=1.0)
    clipper = GradClipper([parameter])
    told = "clip_ inside the closure.*Nothing is skipped"
    for optimizers in (closing, [sgd(), closing]):
        with pytest.raises(TypeError, match=f"{kind.__name__} needs.*{told}"):
            clipper.step(optimizers)
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert training.counted(clipper)[0] == 0


@pytest.mark.parametrize("name", ["rmsprop-foreach", "sgd-loop"])
def test_a_scheduled_step_needs_no_closure(name: str) -> None:
    params = training.parameters()
    made = training.optimizer(name, params)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)
    training.assign(params, training.stream(1)[0])
    before = training.values(params)
    training.clipper(params).step(made)
    assert training.differences(training.values(params), before)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_a_scheduler_after_a_first_step_that_was_skipped(fused: bool, scaled: bool) -> None:
    """What docs/clipper.md says of it: torch has seen no step of an optimizer that is not fused."""
    parameter = torch.nn.Parameter(torch.ones(2))
    made = torch.optim.AdamW([parameter], fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(parameter.sum() * torch.nan).backward()
    assert GradClipper([parameter]).step(made, scaler).skipped
    scaler.update()
    if fused:
        schedule.step()
    else:
        with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
            schedule.step()


def linear() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_an_optimizer_of_other_parameters_is_warned_of_once(fused: bool, several: bool) -> None:
    mine, other = linear(), linear()
    stranger, own = (torch.optim.Adam(m.parameters(), fused=fused) for m in (other, mine))
    clipper = GradClipper(mine)
    optimizers = [own, stranger] if several else stranger
    with pytest.warns(UserWarning, match="Adam has none of the clipper's parameters") as warned:
        clipper.step(optimizers)
    assert [warning.filename for warning in warned] == [__file__]
    clipper.step(optimizers)  # warnings are errors here


def test_no_other_optimizer_is_warned_of() -> None:
    mine, other = linear(), linear()
    both = torch.nn.ModuleList([mine, other])
    optimizer = torch.optim.Adam(both.parameters(), fused=True)
    GradClipper(other).step(optimizer)
    GradClipper(both).step(torch.optim.Adam(mine.parameters()))
    GradClipper(torch.nn.Identity()).step(optimizer)
    without = torch.optim.Adam(mine.parameters())
    without.param_groups[0]["params"] = []
    GradClipper(other).step(without)
