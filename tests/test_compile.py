"""Clipping inside torch.compile, by inductor on the CPU: how many graphs, and equal to eager."""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as torchs
from torch.optim import SGD, AdamW, Optimizer

import fastclip
from fastclip.integrations.torch import patch
from fastclip.rules import AdaGC
from fastclip.testing.compare import bitwise_equal
from tests.making import floats, grads_of, parameters

MAX_NORM = 0.1  # the norms are 0.3 to 2
STEPS = 3

pytestmark = [
    pytest.mark.usefixtures("cpu_available", "_reset"),
    pytest.mark.filterwarnings("ignore:Profiler"),  # that torch.compile leaves out torch's own
]


@pytest.fixture
def _reset() -> None:
    torch.compiler.reset()


class Training:
    """A small model, its optimizer and the same batch at every step."""

    def __init__(self, make: Callable[..., Optimizer] = AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.params: list[Tensor] = list(self.model.parameters())
        self.optimizer = make(self.params, lr=0.01, **options)
        self.x, self.y = torch.randn(32, 8), torch.randn(32, 1)

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.y)

    def run(self, step: Callable[[], Tensor], backward: bool = True) -> list[Tensor]:
        """The norms of some steps, and the weights after them."""
        norms = []
        for _ in range(STEPS):
            if backward:
                self.optimizer.zero_grad()
                self.loss().backward()
            norms.append(step())
        return [*norms, *(p.detach() for p in self.params)]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # AdamW moves a weight by 0.01
    assert min(norm.item() for norm in expected[:STEPS]) > MAX_NORM


def compiled(
    step: Callable[[], Tensor], fullgraph: bool = True
) -> tuple[Callable[[], Tensor], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(step, backend=counter, fullgraph=fullgraph), counter


def update(t: Training, clip: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """Clip, and AdamW's step without what ends a graph: the decorators of ``optimizer.step``."""
    take = inspect.unwrap(type(t.optimizer).step)

    def step() -> Tensor:
        norm = clip(t.params, MAX_NORM)
        with torch.no_grad():
            take(t.optimizer)
        return norm

    return step


def whole(t: Training, gradients: Callable[[Training], None]) -> Callable[[], Tensor]:
    """Forward, backward, clip and update."""

    def step() -> Tensor:
        gradients(t)
        norm = fastclip.clip_grad_norm_(t.params, MAX_NORM)
        with torch.no_grad():
            for p in t.params:
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
        return norm

    return step


def by_backward(t: Training) -> None:
    t.loss().backward()


def by_transform(t: Training) -> None:
    """torch.func.grad: gradients that are part of a graph themselves."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(t.model, params, (t.x,)), t.y)

    named: dict[str, Tensor] = dict(t.model.named_parameters())
    for name, grad in torch.func.grad(loss)(named).items():
        named[name].grad = grad


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [by_backward, by_transform])
def test_a_whole_step_is_one_graph(gradients: Callable[[Training], None]) -> None:
    eager, t = Training(SGD), Training(SGD)
    expected = eager.run(whole(eager, by_backward), backward=False)
    if gradients is by_backward and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip(f"torch {torch.__version__} cannot trace Tensor.backward")
    traces = gradients is by_backward
    step, counter = compiled(whole(t, gradients))
    with torch._dynamo.config.patch(trace_autograd_ops=True) if traces else nullcontext():
        assert_close(t.run(step, backward=False), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["fastclip", "patch"])
def test_clip_and_update_are_one_graph(by: str) -> None:
    eager, t = Training(), Training()
    expected = eager.run(update(eager, fastclip.clip_grad_norm_))
    step, counter = compiled(update(t, fastclip.clip_grad_norm_ if by == "fastclip" else torchs))
    with patch() if by == "patch" else nullcontext():
        got = t.run(step)
    assert_close(got, expected)
    (graph,) = counter.graphs
    assert "fastclip.clip_" in str(graph.graph)


def test_torchs_optimizer_step_is_a_second_graph() -> None:
    t, eager = Training(), Training()

    def step(t: Training) -> Tensor:
        norm = fastclip.clip_grad_norm_(t.params, MAX_NORM)
        t.optimizer.step()
        return norm

    counter = CompileCounterWithBackend("aot_eager")
    take = torch.compile(lambda: step(t), backend=counter)
    assert_close(t.run(take), eager.run(lambda: step(eager)))
    assert counter.frame_count == 2


def test_torch_keeps_fused_optimizers_out_of_graphs() -> None:
    """So a coefficient that is folded into one cannot be part of a graph either."""
    t = Training(fused=True)
    t.loss().backward()
    take = torch.compile(update(t, fastclip.clip_grad_norm_), backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="don't trace into fused optimizer"):
        take()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_a_clipper_steps_an_optimizer_whose_step_is_compiled(options: dict[str, Any]) -> None:
    """It does not hand its coefficient to a step that is not torch's own: gradients are written."""
    eager, t = Training(**options), Training(**options)
    t.optimizer.step = torch.compile(t.optimizer.step, backend="aot_eager")  # type: ignore[assignment, method-assign]
    clippers = [fastclip.GradClipper(each.params, MAX_NORM) for each in (eager, t)]
    expected = eager.run(lambda: clippers[0].step(eager.optimizer).total_norm)
    assert_close(t.run(lambda: clippers[1].step(t.optimizer).total_norm), expected)


CALLS: dict[str, Callable[[fastclip.GradClipper, Optimizer], fastclip.GradStats]] = {
    "step": lambda clipper, optimizer: clipper.step(optimizer),
    "clip_": lambda clipper, optimizer: clipper.clip_(),
    "measure": lambda clipper, optimizer: clipper.measure(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_clipper_is_called_outside_of_the_graph(name: str) -> None:
    def going(t: Training) -> tuple[Callable[[], Tensor], fastclip.GradClipper]:
        clipper = fastclip.GradClipper(t.model, MAX_NORM)
        optimizer, x, call = t.optimizer, t.x, CALLS[name]

        def go() -> Tensor:
            scale = x.square().sum().sqrt()
            return call(clipper, optimizer).total_norm * scale

        return go, clipper

    eager, t = Training(fused=True), Training(fused=True)
    (plain, one), (go, other) = going(eager), going(t)
    counter = CompileCounterWithBackend("aot_eager")
    assert_close(t.run(torch.compile(go, backend=counter)), eager.run(plain))
    assert counter.frame_count == 2  # before and after the call
    assert other.counters()["steps"] == one.counters()["steps"]
    with pytest.raises(Unsupported, match=r"compile fastclip\.clip_grad_norm_ instead"):
        torch.compile(go, backend="eager", fullgraph=True)()


@pytest.mark.parametrize("call", ["clip_grad_norm_", "get_total_norm"])
def test_error_if_nonfinite_is_refused_in_one_graph(call: str) -> None:
    params = parameters(floats(3.0, math.nan))

    def go() -> Tensor:
        if call == "get_total_norm":
            return fastclip.get_total_norm([p.grad for p in params], error_if_nonfinite=True)
        return fastclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)

    with pytest.raises(Unsupported, match="leave out error_if_nonfinite=True, call fastclip out"):
        torch.compile(go, backend="eager", fullgraph=True)()
    with pytest.raises(RuntimeError, match=r"position 0 \(1 NaN, 0 inf\)"):
        torch.compile(go, backend="eager")()


def test_names_of_a_compiled_module_are_those_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    compiled(torch.randn(3, 4)).sum().backward()
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    clipper = fastclip.GradClipper(compiled, rule=AdaGC())
    assert clipper.clip_().names == fastclip.grad_stats(compiled).names == names
    plain = fastclip.GradClipper(model, rule=AdaGC())
    plain.load_state_dict(clipper.state_dict())  # where it would warn of names it has not
    assert plain.state_dict()["counters"]["steps"] == 1


def test_names_of_a_compiled_part() -> None:
    """What docs/compile.md says of them."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    model[0].compile(backend="eager")
    model.add_module("1", cast(nn.Module, torch.compile(model[1], backend="eager")))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    names = ("0.weight", "0.bias", "1._orig_mod.weight", "1._orig_mod.bias")
    assert fastclip.GradClipper(model).measure().names == names


def test_functions_compiled_before_and_after_a_patch() -> None:
    """torch.compile checks what a function calls: each trace serves the time that it is of."""
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(lambda params: torchs(params, 1.0), backend=counter, fullgraph=True)

    def dtype() -> torch.dtype:
        norm: Tensor = clip(parameters(floats(3.0, 4.0, dtype=torch.bfloat16)))
        assert norm.item() == 5.0
        return norm.dtype

    assert dtype() == torch.bfloat16
    for _ in range(2):
        with patch():
            assert dtype() == torch.float32
        assert dtype() == torch.bfloat16
    assert counter.frame_count == 2


NUMBERS: dict[str, Callable[[list[Tensor], float], Tensor | None]] = {
    "clip_grad_norm_": lambda params, x: fastclip.clip_grad_norm_(params, x),
    "max_norm of clip_grads_with_norm_": lambda params, x: fastclip.clip_grads_with_norm_(
        params, x, torch.tensor(5.0)
    ),
    "total_norm of clip_grads_with_norm_": lambda params, x: fastclip.clip_grads_with_norm_(
        params, 2.0, x
    ),
    "clip_grad_value_": lambda params, x: fastclip.clip_grad_value_(params, x),
    "norm_type of clip_grad_norm_": lambda params, x: fastclip.clip_grad_norm_(params, 2.0, x),
    "get_total_norm": lambda params, x: fastclip.get_total_norm([p.grad for p in params], x),
    "grad_stats": lambda params, x: fastclip.grad_stats(params, x).total_norm,
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["dynamic=None", "dynamic=True"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_from_call_to_call(name: str, dynamic: bool | None) -> None:
    call = NUMBERS[name]
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    for number in (2.0, 1.0, 0.5, 3.0, math.inf):
        ours, expected = parameters(floats(3.0, -4.0)), parameters(floats(3.0, -4.0))
        assert traced(ours, number) == call(expected, number)
        assert all(map(bitwise_equal, grads_of(ours), grads_of(expected)))
    if "max_norm" in name or name == "clip_grad_norm_":
        assert counter.frame_count <= 2  # torch.compile follows a number that has changed once


def test_a_threshold_that_becomes_infinite_only_measures() -> None:
    traced = torch.compile(fastclip.clip_grads_with_norm_, backend="aot_eager", fullgraph=True)
    for limit in (1.0, 2.0, math.inf):
        params = parameters(floats(3.0, -4.0))
        traced(params, limit, torch.tensor(math.inf))
        assert params[0].grad is not None
        assert params[0].grad.tolist() == ([3.0, -4.0] if limit == math.inf else [0.0, 0.0])


@pytest.mark.parametrize("number", [-1.0, math.nan])
def test_a_wrong_number_after_a_trace_is_refused(number: float) -> None:
    traced = torch.compile(fastclip.clip_grad_norm_, backend="aot_eager")
    for limit in (1.0, 2.0):
        traced(parameters(floats(3.0, -4.0)), limit)
    with pytest.raises(ValueError, match=f"max_norm must be a number of at least 0.*got {number}"):
        traced(parameters(floats(3.0, -4.0)), number)


def test_inside_a_transform_of_torch_func() -> None:
    def loss(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        p = nn.Parameter(torch.zeros(2))
        p.grad = x.detach() * 3
        stats = fastclip.grad_stats([p])
        norm = fastclip.clip_grad_norm_([p], 1.0)
        fastclip.clip_grads_with_norm_([p], 1.0, 2.0)
        clip = fastclip.GradClipper([p], max_norm=0.25).clip_()
        return (x * p.grad).sum(), (stats.total_norm, norm, clip.total_norm)

    slope, norms = torch.func.grad(loss, has_aux=True)(floats(3.0, 4.0))
    torch.testing.assert_close(slope, floats(0.15, 0.2))  # the clip has no derivative
    assert [norm.item() for norm in norms] == pytest.approx([15.0, 15.0, 0.5], rel=1e-6)
