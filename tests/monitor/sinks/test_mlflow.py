"""MLflow: a store of local files, read back by MLflow's client."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fastclip.monitor import LayerRow, MLflow, StepRecord
from fastclip.monitor.sinks import mlflow as sink_module
from tests.monitor.sinks.making import LAYERS, STEPS, expected, same, write

NAMES = {
    "block.0.weight": "block.0.weight",
    "a/b": "a_b-c14cddc0",
    "a/b/norm": "a_b_norm-",
    LAYERS[3]: "w_0_ _-",
    "x" * 300: "x" * 120 + "-",
    "..": "..-",
}


def history(run_id: str, name: str) -> list[Any]:
    found = mlflow.MlflowClient().get_metric_history(run_id, name)
    return sorted(found, key=lambda metric: metric.timestamp)


def points(run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in history(run_id, name)]


def test_all_of_it_is_read_back() -> None:
    sink = MLflow()
    write(sink)
    sink.close()
    for name in ("loss", "grad_norm", "lr", "clipped", "attempt"):
        found = points(sink.run_id, f"fastclip/{name}")
        assert same(found, [(step, value) for _, step, value in expected(name)]), name
    run = mlflow.MlflowClient().get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["fastclip.event"] == "step 4: warn: spike, grad_norm [bold]__is__[/bold] 2"
    assert points(sink.run_id, "fastclip/events/critical") == [(2, 1.0)]
    assert points(sink.run_id, "fastclip/events/warn") == [(4, 2.0)]


def test_the_metrics_of_a_record_have_a_timestamp_of_their_own() -> None:
    """So a value at a step that came twice is known to be of which attempt."""
    sink = MLflow()
    write(sink)
    sink.close()
    attempts = {m.timestamp: int(m.value) for m in history(sink.run_id, "fastclip/attempt")}
    assert len(attempts) == len(STEPS)
    losses = history(sink.run_id, "fastclip/loss")
    found = [(attempts[metric.timestamp], metric.step, metric.value) for metric in losses]
    assert same(found, expected("loss"))


def test_every_layer_has_a_name_that_is_allowed_and_its_own() -> None:
    sink = MLflow()
    write(sink)
    sink.close()
    metrics = mlflow.MlflowClient().get_run(sink.run_id).data.metrics
    start, end = "fastclip/layers/", "/norm"
    names = [n[len(start) : -len(end)] for n in metrics if n.startswith(start) and n.endswith(end)]
    assert len(names) == len(LAYERS)
    for place, layer in enumerate(LAYERS):
        [name] = [
            name for name in names if points(sink.run_id, start + name + end)[0][1] == place + 0.5
        ]
        if NAMES[layer].endswith("-"):
            assert name[:-8] == NAMES[layer]
            assert all(digit in "0123456789abcdef" for digit in name[-8:])
        else:
            assert name == NAMES[layer]
        assert same(points(sink.run_id, f"{start}{name}/max_abs"), [(3, float("nan"))])


def test_more_metrics_than_fit_into_one_call() -> None:
    layers = tuple(LayerRow(f"layer.{i}", float(i), 1.0, 0.0) for i in range(500))
    sink = MLflow(seconds=1000.0)
    sink.write(StepRecord(7, 1.0, layers=layers), [])
    assert points(sink.run_id, "fastclip/loss") == []  # waits
    sink.close()
    metrics = mlflow.MlflowClient().get_run(sink.run_id).data.metrics
    assert len(metrics) == 1 + 1 + 3 * 500
    assert points(sink.run_id, "fastclip/layers/layer.499/norm") == [(7, 499.0)]


def test_a_run_that_is_there_is_left_running() -> None:
    client = mlflow.MlflowClient()
    run_id = client.create_run(client.create_experiment("mine")).info.run_id
    sink = MLflow(run_id, prefix="opt", layers=False)
    write(sink)
    sink.close()
    run = client.get_run(run_id)
    assert run.info.status == "RUNNING"
    assert not any("layers" in name for name in run.data.metrics)
    assert len(points(run_id, "opt/attempt")) == len(STEPS)


def test_runs_share_an_experiment(tmp_path: Path) -> None:
    store = (tmp_path / "elsewhere").as_uri()
    sinks = [MLflow(tracking_uri=store, experiment="gpt") for _ in range(2)]
    for sink in sinks:
        sink.close()
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("gpt")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert {run.info.run_id for run in found} == {sink.run_id for sink in sinks}


class Failing:
    """A store that fails while told to."""

    def __init__(self, store: Any) -> None:
        self.store, self.fails = store, True

    def log_batch(self, *args: Any, **kwargs: Any) -> None:
        if self.fails:
            raise OSError("no store")
        self.store.log_batch(*args, **kwargs)


def test_a_store_that_fails_for_a_while_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MLflow(seconds=0.0)
    failing = Failing(sink._waiting.store)
    monkeypatch.setattr(sink._waiting, "store", failing)
    for step in range(5):
        with pytest.raises(OSError, match="no store"):
            sink.write(StepRecord(step, float(step)), [])
    failing.fails = False
    sink.write(StepRecord(5, 5.0), [])
    assert points(sink.run_id, "fastclip/loss") == [(step, float(step)) for step in range(6)]


def test_what_waits_for_a_store_that_fails_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "WAITING", 6)
    sink = MLflow(seconds=0.0)
    failing = Failing(sink._waiting.store)
    monkeypatch.setattr(sink._waiting, "store", failing)
    for step in range(3):
        with pytest.raises(OSError, match="no store"):
            sink.write(StepRecord(step, float(step)), [])  # two metrics
    with (
        pytest.warns(UserWarning, match="the 2 oldest of 8 metrics"),
        pytest.raises(OSError, match="no store"),
    ):
        sink.write(StepRecord(3, 3.0), [])
    failing.fails = False
    sink.write(StepRecord(4, 4.0), [])
    assert points(sink.run_id, "fastclip/loss") == [(step, float(step)) for step in range(1, 5)]


def test_a_store_that_works_gets_all_however_much_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "WAITING", 6)
    sink = MLflow(seconds=1000.0)
    for step in range(9):
        sink.write(StepRecord(step, float(step)), [])
    sink.close()
    assert points(sink.run_id, "fastclip/loss") == [(step, float(step)) for step in range(9)]


WITHOUT_CLOSE = """
from fastclip.monitor import MLflow, StepRecord
sink = MLflow()
for step in range(50):
    sink.write(StepRecord(step, 1.0), [])
print(sink.run_id)
"""


def test_a_process_that_ends_without_close_has_sent_all() -> None:
    command = [sys.executable, "-c", WITHOUT_CLOSE]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert points(done.stdout.strip(), "fastclip/loss") == [(step, 1.0) for step in range(50)]
