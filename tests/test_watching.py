"""Which clips are told of, under any name, and that nothing is left behind."""

import gc
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad

import fastclip
from fastclip import redirecting, watching
from tests.making import floats, parameters
from tests.order_loops import CLIPS, Clip, Training

NAMES = [
    *("clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"),
    *("_clip_grads_with_norm_", "_get_total_norm"),
]


class Told:
    """A listener that keeps what it is told, and the gradient's first element after the clip."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.before: list[tuple[set[int], float | None, bool]] = []
        self.after: list[float] = []

    def clipping(self, ids: set[int], limit: float | None, unscales: bool) -> watching.Done:
        self.before.append((ids, limit, unscales))
        return self.done

    def done(self) -> None:
        assert self.params[0].grad is not None
        self.after.append(self.params[0].grad[0].item())


@pytest.fixture
def told() -> Iterator[Told]:
    listener = Told(parameters(floats(3.0, 4.0), floats(12.0)))
    watching.add(listener)
    yield listener
    watching.remove(listener)


def state() -> list[object]:
    """What a guard could have changed in torch, as objects to compare by identity."""
    found: list[object] = []
    for name in NAMES:
        function: Any = getattr(clip_grad, name)
        cells: tuple[CellType, ...] = function.__closure__ or ()
        found += [function, function.__code__, *(cell.cell_contents for cell in cells)]
    utils = vars(torch.nn.utils)
    return [*found, *(utils[name] for name in utils if "norm" in name or "clip" in name)]


def same(first: list[object], second: list[object]) -> bool:
    return all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_every_clip_is_told_once(clip: Clip, told: Told) -> None:
    """Of this version of torch too: without that a guard would see nothing, and say nothing."""
    clip(told.params, 1.0)
    ((ids, limit, unscales),) = told.before
    assert len(ids) == 2
    assert ids == set(map(id, told.params))
    assert (limit, unscales) == (1.0, False)
    ((after,),) = [told.after]
    assert after < 3.0  # it was clipped when `done` was called


def test_every_name_and_way_to_call(told: Told) -> None:
    one = told.params[0]
    torch.nn.utils.clip_grad_norm_(parameters=one, max_norm=1)
    torch.nn.utils.clip_grads_with_norm_(iter(told.params), max_norm=2, total_norm=torch.ones(()))
    torch.nn.utils.clip_grad_value_(clip_value=3.0, parameters=told.params)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.clip_grad_norm((p for p in told.params), 4.0)
    fastclip.clip_grad_norm_([("a", one)], torch.tensor([5.0]))
    fastclip.clip_grads_with_norm_(told.params, 6, 1.0)
    fastclip.clip_grad_value_(iter(told.params), 7)
    assert [limit for _, limit, _ in told.before] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [len(ids) for ids, _, _ in told.before] == [1, 2, 2, 2, 1, 2, 2]


def test_measuring_and_failing_are_not_told(told: Told) -> None:
    params = told.params
    limits: tuple[Any, ...] = (math.inf, "inf", torch.tensor(math.inf))
    for limit in limits:
        torch.nn.utils.clip_grad_norm_(params, limit)
        fastclip.clip_grad_norm_(params, limit)
        torch.nn.utils.clip_grad_value_(params, limit)
    torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    fastclip.grad_stats(params)
    assert told.before == []
    params[1].grad = floats(math.nan)
    for clip in (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="finite"):
            clip(params, 1.0, error_if_nonfinite=True)
    assert told.after == []


def test_nothing_in_torch_is_replaced_but_two_closures() -> None:
    before = state()
    with fastclip.order_guard(Training().optimizer):
        during = state()
        watched = [(a, b) for a, b in zip(before, during, strict=True) if a is not b]
        assert {getattr(a, "__name__", "") for a, _ in watched} == {
            *("_clip_grads_with_norm_", "clip_grad_value_")
        }
        assert all(inspect.unwrap(b) is a for a, b in watched if callable(a) and callable(b))
    assert same(before, state())


def hooks(t: Training) -> list[object]:
    return [*t.optimizer._optimizer_step_pre_hooks, *t.optimizer._optimizer_step_post_hooks]


def test_closing_restores() -> None:
    before, t = state(), Training()
    with fastclip.order_guard(t.optimizer):
        with fastclip.order_guard(t.optimizer, t.scaler) as inner, inner:
            assert len(hooks(t)) == 4
        with pytest.raises(KeyError), fastclip.order_guard(t.optimizer):
            raise KeyError
        assert len(hooks(t)) == 2
    assert same(before, state())
    assert hooks(t) == []
    assert watching._listeners == ()
    first = fastclip.order_guard(t.optimizer)
    second = fastclip.order_guard([t.optimizer, t.optimizer])
    first.close()
    assert not same(before, state())
    second.close()
    assert same(before, state())
    assert hooks(t) == []


def test_a_dropped_guard_keeps_nothing_alive() -> None:
    before, t = state(), Training(scaled=True)
    fastclip.order_guard(t.optimizer, t.scaler)
    t.backward()
    t.scaler.unscale_(t.optimizer)
    t.clip(t.params, 1.0)
    gone = [weakref.ref(each) for each in (t.optimizer, t.model, t.grads()[0])]
    del t
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    Training().clip(parameters(floats(3.0)), 1.0)
    assert same(before, state())


def test_gradients_are_freed_while_a_guard_is_on() -> None:
    t = Training()
    with fastclip.order_guard(t.optimizer):
        t.backward()
        t.clip(t.params, 1.0)
        t.optimizer.step()
        gone = weakref.ref(t.grads()[0])
        t.zero_grad()
        assert gone() is None


def test_someone_elses_wrapper_is_left_alone() -> None:
    """What wrapped the watched function while a guard was on still works after it."""
    name = "clip_grad_value_"
    cell, calls = redirecting._place(name).cell, []
    before = cell.cell_contents
    params = parameters(floats(3.0))
    optimizer = torch.optim.SGD(params)
    with fastclip.order_guard(optimizer):
        inner: Callable[..., None] = cell.cell_contents

        def outer(*args: Any) -> None:
            calls.append(args)
            inner(*args)

        cell.cell_contents = outer
    try:
        assert cell.cell_contents is outer
        torch.nn.utils.clip_grad_value_(params, 1.0)
        assert params[0].grad is not None
        assert params[0].grad.tolist() == [1.0]
        assert len(calls) == 1
    finally:
        cell.cell_contents = before


def test_a_torch_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grad, "clip_grad_value_", lambda *_: None)
    before, t = state(), Training()
    with pytest.raises(RuntimeError, match=r"has no torch\.nn\.utils\.clip_grad\.clip_grad_value_"):
        fastclip.order_guard(t.optimizer)
    assert same(before, state())
    assert hooks(t) == []
    assert watching._listeners == ()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what dynamo imports
@pytest.mark.parametrize("name", ["torch-norm", "torch-value", "fastclip-norm", "fastclip-value"])
def test_compiled_while_a_guard_is_on(name: str) -> None:
    t = Training()
    t.backward()
    torch._dynamo.reset()
    compiled = torch.compile(CLIPS[name], backend="eager", fullgraph=True)
    with fastclip.order_guard(t.optimizer):
        t.optimizer.step()
        compiled(t.params, 1e-3)  # not seen
        assert max(grad.abs().max().item() for grad in t.grads()) <= 1.001e-3
        step = torch.compile(t.optimizer.step, backend="eager")
        step()


@pytest.mark.parametrize("name", ["torch-norm", "fastclip-norm"])
def test_traced_while_a_guard_is_on(name: str) -> None:
    params = parameters(floats(3.0, 4.0))

    def clip(grad: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        params[0].grad = grad
        CLIPS[name](params, limit if name == "fastclip-norm" else 2.0)
        return grad

    optimizer = torch.optim.SGD(params)
    with fastclip.order_guard(optimizer):
        graph = make_fx(clip)(floats(1.0, 1.0), torch.tensor(1.0))
    torch.testing.assert_close(graph(floats(30.0, 40.0), torch.tensor(2.0)), floats(1.2, 1.6))
