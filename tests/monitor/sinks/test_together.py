"""One run, with a rollback, into all sinks at once: what the clients have is what the log has."""

import io
import math
from pathlib import Path
from typing import Any

import mlflow
import rich.console
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastclip.monitor import JSONL, Console, MLflow, Monitor, TensorBoard, WandB
from tests.monitor.making import healthy
from tests.monitor.sinks.test_wandb import history

Points = list[tuple[int, float]]


def observe(monitor: Monitor) -> None:
    """300 steps, a loss that is NaN at 200, and a rollback to 150 after 250."""
    for step in (*range(251), *range(150, 300)):
        fields = dict(vars(healthy(300)[step]))
        fields.update(attempt=None, loss=math.nan if step == 200 else fields["loss"])
        monitor.observe(**fields)


def tensorboard_points(folder: Path) -> Points:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in found.Scalars("fastclip/grad_norm")]


def test_every_sink_has_every_record(tmp_path: Path) -> None:
    out = io.StringIO()
    log, board, tracker = JSONL(tmp_path / "run.jsonl"), TensorBoard(tmp_path / "board"), MLflow()
    run = WandB()
    console = Console(console=rich.console.Console(file=out, width=200))
    sinks: list[Any] = [log, board, run, tracker, console]
    observe(Monitor(sinks=sinks))
    for sink in sinks:
        sink.close()

    wanted = [(record.step, record.grad_norm or 0.0) for record in log]
    assert len(wanted) == 401
    client = mlflow.MlflowClient()
    metrics = client.get_metric_history(tracker.run_id, "fastclip/grad_norm")
    metrics.sort(key=lambda metric: metric.timestamp)
    assert [(metric.step, metric.value) for metric in metrics] == wanted

    rows = history(run.run.settings.sync_file)
    assert [(row["fastclip/step"], row["fastclip/grad_norm"]) for row in rows] == wanted

    folders = [tmp_path / "board", tmp_path / "board/attempt-1"]
    shown = [point for folder in folders for point in tensorboard_points(folder)]
    assert [step for step, _ in shown] == [step for step, _ in wanted]
    pairs = zip(shown, wanted, strict=True)
    assert all(math.isclose(mine, theirs, rel_tol=2**-23) for (_, mine), (_, theirs) in pairs)

    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if "grad norm" in line] == [
        "0",
        "100",
        "200",
        "199",
        "299",
    ]
    assert lines.count("step 200: critical: nonfinite, loss is nan") == 2  # once an attempt
    wandb.teardown()
