"""Rows come a fixed number of steps later, with the values they had, read without a wait."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastclip
from fastclip.monitor import Monitor, NonFinite, Telemetry
from tests import training
from tests.forbidding import READS, HostRead, NoReads
from tests.making import floats, parameters
from tests.monitor.test_observe import Kept

LAGS = [0, 1, 2, 5]


def steps(sink: Kept) -> list[int]:
    return [record.step for record in sink.records]


def lagging(lag: int | None, sinks: Any = (), detectors: Any = None) -> Monitor:
    return Monitor(detectors, sinks, telemetry=Telemetry(lag))


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("lag", LAGS)
def test_a_row_comes_exactly_lag_steps_later(lag: int, value: Any) -> None:
    sink = Kept()
    monitor = lagging(lag, [sink], [NonFinite()])
    for step in range(10):
        bad = step in (3, 9)
        found = monitor.observe(step=step, loss=value * math.nan if bad else value)
        assert steps(sink) == list(range(step + 1 - lag))
        assert [event.step for event in found] == ([step - lag] if step - lag in (3, 9) else [])
    assert [event.step for event in monitor.flush()] == ([9] if lag else [])
    assert steps(sink) == list(range(10))
    assert monitor.flush() == []


class Far(Tensor):
    """Looks as if it were not on the CPU."""

    is_cpu = False


def far(value: float) -> Tensor:
    return torch.tensor(value).as_subclass(Far)


def test_by_default_only_what_is_on_a_device_lags() -> None:
    sink = Kept()
    monitor = Monitor([], [sink])
    monitor.observe(step=0, loss=torch.tensor(0.0))
    assert steps(sink) == [0]
    monitor.observe(step=1, loss=far(1.0))
    monitor.observe(step=2, loss=2.0)  # never before an earlier one
    assert steps(sink) == [0]
    monitor.observe(step=3, loss=torch.tensor(3.0))
    assert steps(sink) == [0, 1, 2, 3]
    for step in (4, 5, 6):
        monitor.observe(step=step, loss=far(step))
    assert steps(sink) == [0, 1, 2, 3, 4]
    monitor.flush()
    assert [record.loss for record in sink.records] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_values_are_those_of_the_time_of_observe() -> None:
    sink = Kept()
    monitor = lagging(2, [sink], [])
    stats = fastclip.grad_stats(parameters(floats(3.0, 4.0), floats(math.nan)))
    loss, lr, batch = torch.tensor(2.0), torch.tensor([0.5]), [torch.tensor([1, 2])]
    monitor.observe(step=0, loss=loss, lr=lr, batch={"ids": batch, "file": "a"}, stats=stats)
    for tensor in (loss, lr, *batch, stats.total_norm, stats.coef):
        tensor.fill_(7)
    stats.clipped.fill_(True)
    [] = monitor.flush()
    [record] = sink.records
    assert (record.loss, record.lr, record.batch) == (2.0, 0.5, {"ids": [[1, 2]], "file": "a"})
    assert math.isnan(record.grad_norm or 0.0)
    assert (record.clip_coef, record.clipped, record.nonfinite_count) == (1.0, False, 1)


class Held:
    """Something to refer to weakly."""


def test_no_graph_is_kept() -> None:
    monitor, held = lagging(2), Held()
    loss = torch.tensor(2.0, requires_grad=True) * 1
    graph: Any = loss.grad_fn
    graph.metadata["held"] = held
    kept = weakref.ref(held)
    monitor.observe(step=0, loss=loss, lr=loss, batch=loss)
    del loss, graph, held
    gc.collect()
    assert kept() is None
    monitor.flush()


# Reads of the host


@contextmanager
def unread(tensors: list[Tensor]) -> Iterator[None]:
    """Reading a value of these raises."""
    own = {id(tensor) for tensor in tensors}

    def refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(self) in own:
                raise HostRead(f"Tensor.{name} reads a value on the host")
            return method(self, *args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch, NoReads():
        for name in READS:
            patch.setattr(Tensor, name, refusing(name, getattr(Tensor, name)))
        yield


def test_the_check_itself() -> None:
    given, other = torch.tensor([1.0]), torch.tensor([2.0])
    with unread([given]):
        assert other.tolist() == [2.0]
        with pytest.raises(HostRead):
            given.tolist()
        with pytest.raises(HostRead):
            other.item()


@pytest.mark.parametrize("rule", ["MaxNorm", "AdaGC"])
def test_observe_reads_nothing_that_it_was_given(rule: str) -> None:
    params, sink = training.parameters(), Kept()
    clipper = training.clipper(params, rule)
    monitor, seen = lagging(2, [sink]), []
    for step, grads in enumerate(training.stream(12, bad={5: math.nan})):
        training.assign(params, grads)
        stats = clipper.clip_()
        loss = torch.tensor(2.0 + step, requires_grad=True) * 1
        scale = torch.tensor(1024.0)
        tensors = [loss, scale, stats.table, stats.total_norm, stats.coef]
        with unread([*tensors, stats.clipped, stats.skipped]):
            monitor.observe(step=step, loss=loss, loss_scale=scale, stats=stats, batch=[loss])
        seen.append((step, 2.0 + step, stats))
    monitor.flush()
    for record, (step, loss_value, stats) in zip(sink.records, seen, strict=True):
        assert (record.step, record.loss, record.batch) == (step, loss_value, [loss_value])
        assert repr(record.grad_norm) == repr(stats.total_norm.item())
        assert record.clip_coef == stats.coef.min().item()
        assert (record.clipped, record.skipped) == (bool(stats.clipped), bool(stats.skipped))
        assert record.nonfinite_count == stats.nonfinite_count.item()
    assert [record.step for record in sink.records if record.nonfinite_count] == [5]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_two_launches_and_three_copies() -> None:
    """Of a row of a loss and statistics that is queued: two gathered groups, and the table. On a
    device each of the three is one copy, on the CPU they are there."""
    stats = fastclip.grad_stats(parameters(floats(3.0, 4.0), floats(1.0)))
    loss = torch.tensor(2.0, requires_grad=True) * 1
    monitor = lagging(2)
    with Counting() as counting:
        monitor.observe(step=0, loss=loss, stats=stats, lr=1e-3, loss_scale=1024.0)
    views = {"aten.detach.default": 1}
    assert counting.calls == {"aten.stack.default": 2, **views}


SPARSE = torch.eye(1).to_sparse()
UNREADABLE: dict[str, dict[str, Any]] = {
    "loss is on the device meta": {"loss": torch.ones((), device="meta")},
    "loss must be a dense tensor of real numbers, got one of torch.float32, torch.sparse": {
        "loss": SPARSE
    },
    "loss must be a dense tensor of real numbers, got one of torch.complex64": {
        "loss": torch.tensor(1j)
    },
    "batch must be a dense tensor": {"batch": [SPARSE]},
    "lr must be one number, got a tensor of shape \\(0,\\)": {"lr": torch.ones(0)},
}


@pytest.mark.parametrize("text", UNREADABLE, ids=str)
@pytest.mark.parametrize("lag", [None, 0, 2])
def test_tensors_without_a_number(lag: int | None, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        lagging(lag).observe(step=0, **UNREADABLE[text])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lag": -1}, ValueError, "lag must be a whole number of at least 0, got -1"),
        ({"lag": 1.5}, TypeError, "lag must be a whole number of at least 0, got 1.5"),
        ({"layers_every": -1}, ValueError, "layers_every must be a whole number of at least 0"),
        ({"layers_before": None}, TypeError, "layers_before must be a whole number"),
    ],
)
def test_wrong_settings(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Telemetry(**arguments)


def test_a_telemetry_belongs_to_one_monitor() -> None:
    telemetry = Telemetry()
    Monitor(telemetry=telemetry)
    with pytest.raises(ValueError, match="this Telemetry belongs to another Monitor"):
        Monitor(telemetry=telemetry)
    with pytest.raises(TypeError, match="telemetry must be a Telemetry, got 2"):
        Monitor(telemetry=2)  # type: ignore[arg-type]
