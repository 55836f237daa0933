"""Rows come a fixed number of steps later, with the values they had, and none is lost."""

import gc
import math
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastclip
from fastclip.monitor import JSONL, Event, Monitor, NonFinite, StepRecord, Telemetry
from tests import training
from tests.forbidding import READS, HostRead, NoReads
from tests.making import floats, parameters
from tests.monitor.making import incident_log
from tests.monitor.test_monitor import fields
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
    losses = [1.0]
    monitor.observe(step=0, loss=loss, lr=lr, batch={"ids": batch, "file": "a"}, stats=stats)
    for tensor in (loss, lr, *batch, stats.table, stats.total_norm, stats.coef):
        tensor.fill_(7)
    stats.clipped.fill_(True)
    losses[0] = 7.0
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
    device each of the three is one copy."""
    stats = fastclip.grad_stats(parameters(floats(3.0, 4.0), floats(1.0)))
    loss = torch.tensor(2.0, requires_grad=True) * 1
    monitor = lagging(2)
    with Counting() as counting:
        monitor.observe(step=0, loss=loss, stats=stats, lr=1e-3, loss_scale=1024.0)
    views = {"aten.detach.default": 1}
    assert counting.calls == {"aten.stack.default": 2, "aten.clone.default": 1, **views}


# Nothing is lost


def test_leaving_the_context_flushes_and_closes(tmp_path: Path) -> None:
    class Closing(Kept):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    sink, log = Closing(), JSONL(tmp_path / "run.jsonl")
    monitor = lagging(3, [log, sink], [NonFinite()])

    def train() -> None:
        with monitor:
            for step in range(6):
                monitor.observe(step=step, loss=torch.tensor(math.nan if step == 4 else 1.0))
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        train()
    assert steps(sink) == list(range(6))
    assert [record.step for record in log] == list(range(6))
    assert sink.closed == 1
    assert [event.step for event in monitor.flush()] == [4]  # found on the way out
    monitor.close()
    assert sink.closed == 1
    with pytest.raises(RuntimeError, match="this Monitor is closed"):
        monitor.observe(step=6)
    with pytest.raises(RuntimeError, match="this Monitor is closed"), monitor:
        pass


END = """
import sys, torch
from fastclip.monitor import JSONL, Monitor, Telemetry
def run():
    monitor = Monitor(sinks=[JSONL(sys.argv[1])], telemetry=Telemetry(2))
    for step in range(4):
        monitor.observe(step=step, loss=torch.tensor(1.0))
    return monitor
"""


@pytest.mark.parametrize(
    ("end", "code"), [("monitor = run(); sys.exit(3)", 3), ("run()", 0)], ids=["exit", "dropped"]
)
def test_the_end_of_the_process_flushes(tmp_path: Path, end: str, code: int) -> None:
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", END + end, str(path)], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert [record.step for record in JSONL(path)] == [0, 1, 2, 3]


def test_a_monitor_that_is_dropped_is_flushed() -> None:
    sink = Kept()
    monitor = lagging(2, [sink])
    monitor.observe(step=0)
    kept = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert (kept(), steps(sink)) == (None, [0])


class Failing(Kept):
    """Fails at some steps; keeps the others."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def write(self, record: StepRecord, events: list[Event]) -> None:
        if record.step in self.steps:
            raise OSError(f"no space for {record.step}")
        super().write(record, events)


def test_a_sink_that_fails_loses_only_its_own() -> None:
    first, failing, last = Kept(), Failing(1, 2), Kept()
    monitor = lagging(2, [first, failing, last], [NonFinite()])
    for step in range(3):
        assert monitor.observe(step=step, loss=math.nan if step == 1 else 1.0) == []
    with pytest.raises(OSError, match="no space for 1"):
        monitor.observe(step=3, loss=1.0)
    with pytest.raises(OSError, match="no space for 2"):
        monitor.flush()
    assert (steps(first), steps(failing), steps(last)) == ([0, 1, 2, 3], [0, 3], [0, 1, 2, 3])
    assert [event.step for event in monitor.flush()] == [1]  # it was not lost with the exception
    assert monitor.state_dict()["step"] == 3


def test_a_flush_gets_over_several_failures() -> None:
    sink = Failing(0, 1, 2)
    monitor = lagging(5, [sink])
    for step in range(5):
        monitor.observe(step=step)
    with pytest.raises(OSError, match="no space for 2") as caught:
        monitor.flush()
    second = caught.value.__context__
    assert second is not None
    assert [str(second), str(second.__context__)] == ["no space for 1", "no space for 0"]
    assert steps(sink) == [3, 4]


def test_failures_on_the_way_out_hide_no_error() -> None:
    monitor = lagging(5, [Failing(0, 1)])

    def train() -> None:
        with monitor:
            monitor.observe(step=0)
            monitor.observe(step=1)
            raise ZeroDivisionError("a bug")

    with pytest.raises(OSError, match="no space for 1") as caught:
        train()
    chain, error = [], caught.value.__context__
    while error is not None:
        chain.append(str(error))
        error = error.__context__
    assert chain == ["no space for 0", "a bug"]


def test_a_value_found_out_late_takes_its_row_alone() -> None:
    sink = Kept()
    monitor = lagging(1, [sink], [])
    monitor.observe(step=0, clipped=torch.tensor(0.5))
    with pytest.raises(TypeError, match=r"clipped must be true or false, got 0\.5, .* the step 0"):
        monitor.observe(step=1, clipped=torch.tensor(1.0))
    monitor.observe(step=2)
    assert [(record.step, record.clipped) for record in sink.records] == [(1, True)]


@pytest.mark.parametrize(
    "call",
    [
        lambda monitor: monitor.observe(step=9),
        Monitor.flush,
        Monitor.close,
        Monitor.state_dict,
        lambda monitor: monitor.replay([]),
    ],
    ids=["observe", "flush", "close", "state_dict", "replay"],
)
def test_a_sink_cannot_call_its_own_monitor(call: Callable[[Monitor], Any]) -> None:
    class Calling(Kept):
        def write(self, record: StepRecord, events: list[Event]) -> None:
            super().write(record, events)
            if record.step == 0:
                call(monitor)

    calling, other = Calling(), Kept()
    monitor = lagging(1, [calling, other])
    monitor.observe(step=0)
    with pytest.raises(RuntimeError, match="a detector or a sink called its own Monitor"):
        monitor.observe(step=1)
    monitor.observe(step=2)
    monitor.flush()
    assert steps(calling) == steps(other) == [0, 1, 2]


def test_what_is_refused_is_not_queued() -> None:
    sink = Kept()
    monitor = lagging(2, [sink], [])
    monitor.observe(step=0)
    for bad in ({"los": 1.0}, {"loss": torch.ones(2)}, {"loss": "1"}, {"batch": {1, 2}}):
        with pytest.raises(TypeError):
            monitor.observe(step=1, **bad)
    monitor.observe(step=1)
    assert steps(sink) == []
    monitor.observe(step=2)
    assert steps(sink) == [0]


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


# Attempts and states


def test_attempts_are_counted_in_the_order_of_the_rows() -> None:
    sink = Kept()
    monitor = lagging(3, [sink], [])
    for step in (0, 1, 1, 5, 3, 4):
        monitor.observe(step=torch.tensor(step))  # type: ignore[arg-type]
    monitor.observe(step=5, attempt=9)
    monitor.observe(step=5)
    assert monitor.attempt == 2  # of step 3, the newest record
    monitor.flush()
    assert [record.attempt for record in sink.records] == [0, 0, 1, 1, 2, 2, 9, 10]


def test_a_state_is_of_all_rows_and_loses_no_event() -> None:
    monitor = lagging(2, (), [NonFinite()])
    for step in range(3):
        monitor.observe(step=step, loss=math.nan)
    assert monitor.state_dict()["step"] == 2
    assert [event.step for event in monitor.observe(step=3, loss=1.0)] == [1, 2]
    monitor.observe(step=4, loss=math.nan)
    monitor.load_state_dict(Monitor([NonFinite()]).state_dict())
    assert [event.step for event in monitor.flush()] == [4]


def test_a_rollback_with_rows_on_their_way() -> None:
    """They belong to the attempt before it."""
    sink = Kept()
    monitor = lagging(2, [sink], [])
    monitor.observe(step=0)
    state = monitor.state_dict()
    for step in (1, 2, 3):
        monitor.observe(step=step)
    monitor.load_state_dict(state)
    for step in (1, 2, 3):
        monitor.observe(step=step)
    monitor.flush()
    pairs = [(record.attempt, record.step) for record in sink.records]
    assert pairs == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def joined(found: list[list[Event]]) -> str:
    """As text, in which NaN equals NaN."""
    return repr([event for events in found for event in events])


def test_a_lag_changes_no_event() -> None:
    records = incident_log()
    at_once, later = Monitor(), lagging(2)
    found = [at_once.observe(**fields(record)) for record in records]
    delayed = [later.observe(**fields(record)) for record in records]
    assert repr([[], [], *found[:-2]]) == repr(delayed)
    assert repr(later.flush()) == joined(found[-2:])
    assert later.state_dict() == at_once.state_dict()


def test_resumes_at_every_cut_point_with_rows_on_their_way() -> None:
    """At each of 2,000 cuts a Monitor with two rows queued gives the state of all rows so far, with
    their events still to come; one made of that state says the same of the next rows, and is then
    in the same state. So it says the same of all that follow.
    """
    records = incident_log()
    uncut = Monitor()
    found, states = [], [uncut.state_dict()]
    for record in records:
        found.append(uncut.observe(**fields(record)))
        states.append(uncut.state_dict())
    for cut in range(1, len(records)):
        start = max(cut - 2, 0)
        before, after = lagging(2), lagging(2)
        before.load_state_dict(states[start])
        for record in records[start:cut]:
            assert before.observe(**fields(record)) == []
        state = pickle.loads(pickle.dumps(before.state_dict()))
        assert state == states[cut]
        assert repr(before.flush()) == joined(found[start:cut])
        after.load_state_dict(state)
        following = records[cut : cut + 3]
        events = [after.observe(**fields(record)) for record in following]
        assert joined([*events, after.flush()]) == joined(found[cut : cut + 3])
        assert after.state_dict() == states[min(cut + 3, len(records))]
