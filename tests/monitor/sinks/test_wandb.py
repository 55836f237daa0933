"""Weights & Biases: a run in offline mode, read back from its file.

The package has no reader of its own file any more, so its frames, those of a LevelDB log, are
taken apart here; what is in them is W&B's own message type.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from fastclip.monitor import StepRecord, WandB
from tests.monitor.sinks.making import LAYERS, STEPS, expected, same, write

BLOCK, HEADER = 32768, 7
RECORD: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _service_ends() -> Iterator[None]:
    yield
    wandb.teardown()


def messages(path: str) -> Iterator[Any]:
    # W&B's process writes the file; a run's finish() does not wait for it, but this does.
    wandb.teardown()
    data, at, whole = Path(path).read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no header fits into what is left of the block
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER + size
        whole += data[at - size : at]
        if kind in (1, 4):  # all of it, or the last part
            yield RECORD.FromString(whole)
            whole = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(path: str) -> list[dict[str, Any]]:
    kept = (message.history for message in messages(path) if message.HasField("history"))
    return [values(row.item) for row in kept]


def column(rows: list[dict[str, Any]], name: str) -> list[tuple[int, int, float]]:
    return [
        (int(row["fastclip/attempt"]), row["fastclip/step"], float(row[name]))
        for row in rows
        if name in row
    ]


def test_all_of_it_is_read_back(tmp_path: Path) -> None:
    sink = WandB(project="tests")
    path = sink.run.settings.sync_file
    write(sink)
    sink.close()
    rows = history(path)
    assert [(row["fastclip/attempt"], row["fastclip/step"]) for row in rows] == STEPS
    assert [row["_step"] for row in rows] == list(range(len(STEPS)))
    for name in ("loss", "grad_norm", "lr", "clipped"):
        assert same(column(rows, f"fastclip/{name}"), expected(name)), name
    for place, layer in enumerate(LAYERS):
        assert column(rows, f"fastclip/layers/{layer}/norm") == [(0, 3, place + 0.5)]
        assert same(column(rows, f"fastclip/layers/{layer}/max_abs"), [(0, 3, float("nan"))])
    assert column(rows, "fastclip/events/critical") == [(0, 2, 1.0)]
    assert column(rows, "fastclip/events/warn") == [(0, 4, 2.0)]


def test_charts_are_over_our_step_and_the_summary_has_the_newest_event() -> None:
    sink = WandB(prefix="opt", layers=False)
    path = sink.run.settings.sync_file
    write(sink)
    sink.close()
    found = list(messages(path))
    metrics = [message.metric for message in found if message.HasField("metric")]
    assert ("opt/*", "opt/step") in [(metric.glob_name, metric.step_metric) for metric in metrics]
    newest: dict[str, Any] = {}
    for message in found:
        newest.update(values(message.summary.update))
    assert newest["opt/events/newest"] == "step 4: warn: spike, grad_norm [bold]__is__[/bold] 2"
    assert not any("/layers/" in name for row in history(path) for name in row)


def test_a_run_that_is_there_is_shared_and_left_running() -> None:
    run = wandb.init()
    path = run.settings.sync_file
    sink = WandB(run)
    for step in range(5):
        run.log({"mine": step})
        sink.write(StepRecord(step, float(step)), [])
    sink.close()
    run.log({"after": 1})
    again = WandB(project="other")  # wandb.init gives the run that is going on
    again.close()
    run.log({"after": 2})
    run.finish()
    rows = history(path)
    assert [row["mine"] for row in rows if "mine" in row] == list(range(5))
    assert [row["after"] for row in rows if "after" in row] == [1, 2]
    assert column(rows, "fastclip/loss") == [(0, step, float(step)) for step in range(5)]


def test_settings_for_a_run_that_is_there_are_refused() -> None:
    run = wandb.init()
    with pytest.raises(TypeError, match="takes no settings for a run that is there, got project"):
        WandB(run, project="other")
    run.finish()
