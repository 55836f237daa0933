"""No row is lost: at the end of a loop or process, with sinks that fail, in refused calls."""

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip.monitor import JSONL, Event, Monitor, NonFinite, StepRecord
from tests.monitor.test_observe import Kept
from tests.monitor.test_telemetry import lagging, steps


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


def test_going_on_after_the_context(tmp_path: Path) -> None:
    """As the error of a closed Monitor says: a new one with its state."""
    log = JSONL(tmp_path / "run.jsonl")
    with Monitor(sinks=[log]) as old:
        for step in range(120):
            old.observe(step=step, loss=1.0)
    with pytest.raises(RuntimeError, match=r"new\.load_state_dict\(old\.state_dict\(\)\)"):
        old.observe(step=120, loss=9.0)
    with Monitor(sinks=[log]) as new:
        new.load_state_dict(old.state_dict())
        assert "spike" in [event.kind for event in new.observe(step=120, loss=9.0)]
        assert new.attempt == 0
    assert [record.step for record in log] == list(range(121))


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


WITHOUT_TORCH = """
import sys
from fastclip.monitor import JSONL, Monitor, Telemetry
monitor = Monitor(sinks=[JSONL(sys.argv[1])], telemetry=Telemetry(2))
for step in range(4):
    monitor.observe(step=step, loss=1.0)
assert "torch" not in sys.modules
"""


def test_the_end_of_a_process_flushes_before_files_are_closed(tmp_path: Path) -> None:
    """What closes the log is then made after the Monitor, for nobody had a finalizer before."""
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
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


def test_a_flush_gets_over_more_failures_than_calls_nest() -> None:
    count = sys.getrecursionlimit() + 100
    failing, other = Failing(*range(count)), Kept()
    monitor = lagging(count, [failing, other], [])
    for step in range(count):
        monitor.observe(step=step)
    with pytest.raises(OSError, match=f"no space for {count - 1}") as caught:
        monitor.flush()
    texts, error = [], caught.value.__context__
    while error is not None:
        texts.append(str(error))
        error = error.__context__
    assert texts == [f"no space for {step}" for step in reversed(range(count - 1))]
    assert steps(other) == list(range(count))


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
