"""What a clipper can be made of, and what it clips when the model changes under it."""

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip import GradClipper
from fastclip.rules import LogZ, MaxNorm
from tests import training
from tests.making import floats, grads_of, parameters


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    return made


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (lambda m: m, ("0.weight", "0.bias", "1.weight", "1.bias")),
        (lambda m: m.named_parameters(), ("0.weight", "0.bias", "1.weight", "1.bias")),
        (lambda m: list(m.parameters()), ("0", "1", "2", "3")),
        (lambda m: m.parameters(), ("0", "1", "2", "3")),
        (lambda m: [("a", p) for p in m.parameters()][:1], ("a",)),
        (lambda m: m[0].bias, ("0",)),
    ],
    ids=["module", "named", "list", "generator", "pairs", "tensor"],
)
def test_kinds_of_parameters(listed: Callable[[Any], Any], names: tuple[str, ...]) -> None:
    made = model()
    clipper = GradClipper(listed(made), 1.0)
    for _ in range(3):
        for parameter in made.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert clipper.clip_().names == names
    after = [p.grad for p in made.parameters() if p.grad is not None]
    expected = math.sqrt(1 + 11 - {4: 11, 1: 6 if "a" in names else 2}[len(names)])
    assert training.total(after) == pytest.approx(expected, rel=1e-6)


def test_a_module_is_read_again_every_step() -> None:
    made = model()
    clipper = GradClipper(made, 1.0)
    assert clipper.clip_().names == ("0.weight", "0.bias", "1.weight", "1.bias")
    made[0].requires_grad_(False)  # frozen
    made[0].weight.grad = made[0].bias.grad = None
    assert clipper.clip_().names == ("1.weight", "1.bias")
    made[0].bias.requires_grad_(True)  # thawed in part
    made[0].bias.grad = torch.full((2,), 3.0)
    assert clipper.clip_().names == ("0.bias", "1.weight", "1.bias")
    made.append(nn.Linear(1, 1, bias=False))  # grown
    made[2].weight.grad = torch.ones(1, 1)
    assert clipper.clip_().names == ("0.bias", "1.weight", "1.bias", "2.weight")
    made[1] = nn.Linear(2, 1, bias=False)  # replaced
    made[1].weight.grad = torch.full((1, 2), 100.0)
    assert clipper.clip_().names == ("0.bias", "1.weight", "2.weight")
    assert training.total([p.grad for p in made.parameters() if p.grad is not None]) <= 1 + 1e-6


def test_a_list_is_listed_once() -> None:
    params = parameters(floats(3.0), floats(4.0))
    clipper = GradClipper(params, 1.0)
    params.append(parameters(floats(100.0))[0])
    assert clipper.clip_().total_norm.item() == 5.0
    assert params[2].grad is not None
    assert params[2].grad.item() == 100.0


def test_gradients_may_be_new_tensors_every_step() -> None:
    """As zero_grad(set_to_none=True) makes them."""
    (parameter,) = params = parameters(floats(3.0))
    clipper = GradClipper(params, 1.0)
    for value in (3.0, 5.0, 0.5):
        parameter.grad = floats(value)
        assert clipper.clip_().total_norm.item() == value
        assert parameter.grad.item() == pytest.approx(min(1.0, value), rel=1e-6)
    parameter.grad = None
    assert clipper.clip_().names == ()


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_freezing_keeps_the_history_of_a_tensor(mode: str) -> None:
    """AdaGC of a run in which a tensor is frozen for a while: it goes on where it stopped, and is
    bitwise what it would be if the steps without it had not been."""
    params, alone = training.parameters(), training.parameters()
    made = training.optimizer(f"adam-{mode}", params)
    clipper, other = training.clipper(params, "AdaGC"), training.clipper(alone, "AdaGC")
    for step, grads in enumerate(training.stream(24)):
        frozen = 10 <= step < 16
        training.assign(params, grads | {"layer.bias": None} if frozen else grads)
        stats = clipper.step(made)
        assert len(stats.names) == 4 - frozen
        if frozen:
            assert "layer.bias" not in stats.names
            continue
        training.assign(alone, {"layer.bias": grads["layer.bias"]} if step > 9 else grads)
        expected = other.clip_()
        for field in ("threshold", "coef"):
            got, want = getattr(stats, field), getattr(expected, field)
            got = got[stats.names.index("layer.bias")]
            want = want[expected.names.index("layer.bias")]
            training.same(got, want, when=f"{field} at step {step}")


def test_a_tensor_that_comes_late_has_a_warm_up_of_its_own() -> None:
    params = training.parameters()
    clipper = training.clipper(params, "AdaGC")
    max_norm, warmup = training.RULES["AdaGC"]["max_norm"], training.RULES["AdaGC"]["warmup"]
    for step, grads in enumerate(training.stream(24)):
        training.assign(params, grads | ({"scale": None} if step < 10 else {}))
        stats = clipper.clip_()
        limits = dict(zip(stats.names, stats.threshold.tolist(), strict=True))
        for name, limit in limits.items():
            first = 10 if name == "scale" else 0
            assert (limit == max_norm) == (step - first < warmup), f"{name} at step {step}"


def test_the_same_parameter_twice() -> None:
    made = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    a: Any = made["a"]
    made["b"].weight = a.weight
    a.weight.grad = torch.full((2, 2), 5.0)
    stats = GradClipper(made, 1.0).clip_()
    assert stats.total_norm.item() == 10.0
    assert a.weight.grad.flatten().tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    weights = [("x", a.weight), ("y", a.weight)]
    stats = GradClipper(weights, 1.0).clip_()
    assert stats.total_norm.item() == pytest.approx(1.0, rel=1e-6)


def test_without_a_threshold_it_is_one() -> None:
    params = parameters(floats(3.0, 4.0))
    stats = GradClipper(params).clip_()
    assert stats.threshold.item() == 1.0
    assert grads_of(params)[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("how", ["max_norm", "rule"])
def test_a_schedule_counts_steps(how: str) -> None:
    """From 0, skipped ones included and measure() not."""
    params = parameters(floats(30.0))
    asked = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 10.0 / (step + 1)

    clipper = (
        GradClipper(params, schedule)
        if how == "max_norm"
        else GradClipper(params, rule=MaxNorm(schedule))
    )
    optimizer = torch.optim.SGD(params, lr=0.0)
    for step in range(6):
        params[0].grad = floats(math.nan if step in (0, 3) else 30.0)
        stats = clipper.measure()
        assert clipper.measure().threshold.item() == stats.threshold.item()
        stats = clipper.step(optimizer) if step % 2 else clipper.clip_()
        assert bool(stats.skipped) == (step in (0, 3))
        if step not in (0, 3):
            assert stats.threshold.item() == pytest.approx(10.0 / (step + 1), rel=1e-6)
            assert params[0].grad is not None
            assert params[0].grad.item() == pytest.approx(10.0 / (step + 1), rel=1e-6)
    assert sorted(set(asked)) == list(range(6))
    assert all(type(step) is int for step in asked)
    assert training.counted(clipper)[0] == 6


def test_a_schedule_goes_on_after_loading() -> None:
    params = parameters(floats(30.0))
    first, second = (GradClipper(params, lambda step: 10.0 / (step + 1)) for _ in "ab")
    for _ in range(4):
        params[0].grad = floats(30.0)
        first.clip_()
    second.load_state_dict(first.state_dict())
    assert second.clip_().threshold.item() == 2.0


@pytest.mark.parametrize("policy", training.POLICIES)
def test_a_schedule_that_gives_no_threshold_changes_nothing(policy: Any) -> None:
    params = parameters(floats(30.0, 40.0))
    clipper = GradClipper(params, lambda step: 1.0 - step, nonfinite=policy)
    clipper.clip_()
    clipper.clip_()
    params[0].grad = floats(30.0, 40.0 if policy == "error" else math.nan)
    before = params[0].grad.clone()
    with pytest.raises(ValueError, match=r"-1"):
        clipper.clip_()
    training.same(params[0].grad, before)
    assert training.counted(clipper)[0] == 2


def test_a_tensor_threshold_may_change_between_steps() -> None:
    params, max_norm = parameters(floats(30.0)), torch.tensor(3.0)
    clipper = GradClipper(params, max_norm)
    assert clipper.clip_().threshold.item() == 3.0
    stats = clipper.measure()
    max_norm.fill_(2.0)
    assert clipper.clip_().threshold.item() == 2.0
    assert stats.threshold.item() == 3.0, "what was said of a step stays"
    assert params[0].grad is not None
    assert params[0].grad.item() == pytest.approx(2.0, rel=1e-6)


OPTIONS = list(inspect.signature(GradClipper).parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_cannot_be_set_afterwards(name: str) -> None:
    params = parameters(floats(3.0, 4.0))
    clipper = GradClipper(params, 2.5)
    told = f"{name} of a GradClipper cannot be set.*build a new GradClipper with another {name}"
    with pytest.raises(AttributeError, match=told) as caught:
        setattr(clipper, name, 0.001)
    assert ("a function of the step" in str(caught.value)) == (name == "max_norm")
    assert clipper.clip_().threshold.item() == 2.5


def test_other_attributes_can_be_set() -> None:
    class Own(GradClipper):
        def __init__(self) -> None:
            super().__init__(parameters(floats(3.0)))
            self.history: list[float] = []

    assert Own().history == []


SCHEDULES: dict[str, tuple[Callable[..., float], str | None]] = {
    "nothing": (lambda: 1.0, "too many positional arguments"),
    "two": (lambda step, total: 1.0, "missing a required argument: 'total'"),
    "by-keyword": (lambda *, step: 1.0, "too many positional arguments"),
    "default": (lambda step, total=3: 1.0, None),
    "any": (lambda *steps: 1.0, None),
    "without-a-signature": (max, None),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_takes_a_step(kind: str) -> None:
    function, fault = SCHEDULES[kind]
    told = "max_norm as a function is called with the number of steps before it"
    if fault is None:
        assert callable(MaxNorm(function).max_norm)
    else:
        with pytest.raises(TypeError, match=f"{told}.*{fault}"):
            GradClipper(parameters(floats(1.0)), function)


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_norm": -1.0}, ValueError, "max_norm.*-1"),
    ({"max_norm": math.nan}, ValueError, "max_norm.*nan"),
    ({"max_norm": 1.0, "rule": MaxNorm(1.0)}, TypeError, "max_norm.*rule|rule.*max_norm"),
    ({"max_norm": 1.0, "rule": LogZ()}, TypeError, "max_norm.*rule|rule.*max_norm"),
    ({"max_norm": torch.ones(2)}, ValueError, "max_norm.*one element"),
    ({"nonfinite": "ignore"}, ValueError, "nonfinite.*ignore"),
    ({"norm_type": math.nan}, ValueError, "norm_type.*nan"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        GradClipper(parameters(floats(1.0)), **options)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        GradClipper(parameters(floats(1.0)), 1.0, MaxNorm(1.0))  # type: ignore[call-arg]


@pytest.mark.parametrize("policy", training.POLICIES)
@pytest.mark.parametrize("bad", [torch.ones(2, dtype=torch.int32), torch.tensor(True)], ids=str)
def test_gradients_that_cannot_be_clipped(policy: Any, bad: Tensor) -> None:
    params = [("good", parameters(floats(3.0))[0]), ("wrong", parameters(bad)[0])]
    params[1][1].grad = bad
    clipper = GradClipper(params, 1.0, nonfinite=policy)
    with pytest.raises(TypeError, match="wrong"):
        clipper.clip_()
    assert params[0][1].grad is not None
    assert params[0][1].grad.item() == 3.0
    assert training.counted(clipper)[0] == 0


def test_accumulated_gradients_are_clipped_once() -> None:
    """Micro-batches: their sum is what is measured."""
    params = training.parameters()
    made, clipper = training.optimizer("adam-fused", params), training.clipper(params)
    a, b = training.stream(2)
    for grads in (a, b):
        torch.stack([(params[name] * grad).sum() for name, grad in grads.items()]).sum().backward()
    stats = clipper.step(made)
    together = {name: a[name] + b[name] for name in a}
    assert stats.total_norm.item() == pytest.approx(training.total(together), rel=1e-6)


@pytest.mark.parametrize("rule", training.RULES)
def test_copies(rule: str) -> None:
    """Of a model and its clipper together; neither of the two then knows of the other."""
    made, grads = nn.Linear(3, 2), [torch.rand(2, 3) * 9 for _ in range(8)]
    clipper = GradClipper(made, rule=training.rule(rule))

    def go_on(module: nn.Linear, own: GradClipper, some: list[Tensor]) -> list[Any]:
        decided = []
        for grad in some:
            module.weight.grad = grad.clone()
            stats = own.clip_()
            decided.append([stats.threshold, stats.coef])
        return decided

    go_on(made, clipper, grads[:4])
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        twin, own = copied((made, clipper))
        expected = go_on(twin, own, grads[4:])
        training.same(go_on(*copy.deepcopy((made, clipper)), grads[4:]), expected)
        assert training.counted(own)[0] == 8
        assert training.counted(clipper)[0] == 4


def test_what_a_clipper_shows_of_itself() -> None:
    clipper = GradClipper(torch.nn.Linear(2, 2), 5.0, norm_type="inf", nonfinite="zero")
    expected = "GradClipper(2 parameters, rule=MaxNorm(max_norm=5.0), norm_type=inf, "
    assert repr(clipper) == expected + "nonfinite='zero')"


def test_what_an_overlap_shows_of_itself() -> None:
    model = torch.nn.Linear(1 << 10, 1 << 9)  # its weight is worth a hook
    clipper = GradClipper(model, overlap=True)
    model(torch.ones(1, 1 << 10)).sum().backward()
    clipper.clip_()
    of_hooks = "<Overlap: 1 of 2 gradients of the last step from hooks>"
    assert repr(clipper.overlap) == of_hooks
    assert repr(clipper).endswith(f"nonfinite='skip', overlap={of_hooks})")
    without = GradClipper(torch.nn.Linear(2, 2), overlap=True)
    assert repr(without.overlap).startswith("<Overlap without hooks: no parameter is a plain leaf")


def test_public_names() -> None:
    assert "GradClipper" in fastclip.__all__
    for name in ("MaxNorm", "AGC", "AdaGC", "ZClip", "LogZ", "AutoClip"):
        assert hasattr(fastclip.rules, name)
