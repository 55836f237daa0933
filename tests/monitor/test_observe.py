"""What observe takes: numbers, NumPy scalars, CPU tensors, statistics; and what it refuses."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastclip
from fastclip.monitor import JSONL, Event, LayerRow, Monitor, StepRecord, Telemetry
from fastclip.monitor.records import NAMES
from tests.making import floats, parameters


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.events: list[list[Event]] = []

    def write(self, record: StepRecord, events: list[Event]) -> None:
        self.records.append(record)
        self.events.append(events)


def observed(**fields: Any) -> StepRecord:
    sink = Kept()
    Monitor([], [sink]).observe(**fields)
    [record] = sink.records
    return record


def test_every_field_arrives() -> None:
    layers = (LayerRow("w", 1.0, 2.0, 0.5, 3.0, 1e-3),)
    record = StepRecord(
        *(7, 2.5, 2.6, 1.5, 0.5, True, 1e-3, 1024.0, 3, False, 11.0, 100.0, 1e-4),
        *({"file": "a", "rows": [1, 2]}, 4, layers),
    )
    assert tuple(vars(record)) == NAMES
    assert observed(**vars(record)) == record


NUMBERS = {
    "float": 2.5,
    "int": 2,
    "numpy-float32": np.float32(2.5),
    "numpy-0d": np.array(2.5),
    "numpy-1": np.array([2.5]),
    "tensor": torch.tensor(2.5),
    "tensor-1": torch.tensor([[2.5]]),
    "bfloat16": torch.tensor(2.5, dtype=torch.bfloat16),
    "int64": torch.tensor(2),
    "learning": torch.tensor(2.5, requires_grad=True),
    "computed": 1 * torch.tensor(2.5, requires_grad=True),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_become_floats(kind: str) -> None:
    record = observed(step=np.int64(4), loss=NUMBERS[kind], lr=NUMBERS[kind])
    number = 2.0 if kind in ("int", "int64") else 2.5
    assert record == StepRecord(4, number, lr=number)
    assert {type(record.step), type(record.loss), type(record.lr)} == {int, float}


def test_flags_counts_and_metadata() -> None:
    record = observed(
        step=torch.tensor(4),
        clipped=torch.tensor(True),
        skipped=np.bool_(False),
        nonfinite_count=torch.tensor(3),
        batch={"ids": torch.tensor([1, 2]), "source": ("a", None), 3: np.float64(0.5)},
    )
    batch = {"ids": [1, 2], "source": ["a", None], "3": 0.5}
    assert record == StepRecord(4, clipped=True, skipped=False, nonfinite_count=3, batch=batch)
    assert (type(record.clipped), type(record.nonfinite_count)) == (bool, int)


def test_layers_of_statistics_rows_and_mappings() -> None:
    names, tensors = ("w", "b"), parameters(floats(3.0, 1.0, math.inf, 0.0), floats(3.0, 4.0))
    stats = fastclip.grad_stats(list(zip(names, tensors, strict=True)))
    given = [*stats.layers(), LayerRow("own", 1.0), {"name": "mapped", "param_norm": 2, "x": 0}]
    record = observed(step=0, layers=given)
    assert record.layers == (
        LayerRow("w", math.inf, 3.0, 0.25),
        LayerRow("b", 5.0, 4.0, 0.0),
        LayerRow("own", 1.0),
        LayerRow("mapped", param_norm=2.0),
    )


def test_statistics_fill_their_fields_and_keywords_win() -> None:
    stats = fastclip.grad_stats(parameters(floats(3.0, 4.0)))
    expected = StepRecord(
        1, grad_norm=5.0, clip_coef=1.0, clipped=False, nonfinite_count=0, skipped=False
    )
    assert observed(step=1, stats=stats) == expected
    record = observed(step=1, stats=stats, grad_norm=7.0, clipped=True)
    assert (record.grad_norm, record.clipped, record.clip_coef) == (7.0, True, 1.0)
    bad = observed(step=1, stats=fastclip.grad_stats(parameters(floats(3.0, math.inf))))
    assert (bad.grad_norm, bad.nonfinite_count) == (math.inf, 1)


def test_of_many_coefficients_the_smallest() -> None:
    def of(coef: Sequence[float]) -> StepRecord:
        stats = fastclip.grad_stats(parameters(*(floats(2.0) for _ in coef)))
        return observed(step=0, stats=replace(stats, coef=torch.tensor(coef)))

    assert of([1.0, 0.25, 0.5]).clip_coef == 0.25
    assert of([]).clip_coef == 1.0


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "a record has no 'los'; its fields are step, loss, val_loss", {"los": 1.0}),
    (TypeError, "loss must be a number, got '2.5'", {"loss": "2.5"}),
    (TypeError, "loss must be a number, got b'2.5'", {"loss": b"2.5"}),
    (TypeError, "loss must be a number, got True", {"loss": True}),
    (TypeError, "loss must be a number, got 1j", {"loss": 1j}),
    (TypeError, r"loss must be one number, got a tensor of shape \(2,\)", {"loss": torch.ones(2)}),
    (TypeError, r"lr must be one number, got an array of shape \(0,\)", {"lr": np.ones(0)}),
    (TypeError, "clipped must be true or false, got 0.5", {"clipped": 0.5}),
    (TypeError, "nonfinite_count must be a whole number of at least 0", {"nonfinite_count": 0.5}),
    (TypeError, "nonfinite_count .*got nan", {"nonfinite_count": math.nan}),
    (TypeError, "attempt must be a whole number of at least 0, got -1", {"attempt": -1}),
    (TypeError, "step must be a whole number, got 0.5", {"step": 0.5}),
    (TypeError, "a record needs a step", {"step": None}),
    (TypeError, "batch must be what JSON has, got <object", {"batch": object()}),
    (TypeError, "batch must be what JSON has", {"batch": {"x": [1, {2}]}}),
    (TypeError, "layers must be a sequence of LayerRow, got 3", {"layers": 3}),
    (TypeError, "loss is on the device meta", {"loss": torch.ones((), device="meta")}),
    (TypeError, "batch is on the device meta", {"batch": [torch.ones(2, device="meta")]}),
    (TypeError, r"stats must be GradStats, got tensor\(2.\); a norm", {"stats": torch.tensor(2.0)}),
]


@pytest.mark.parametrize(
    ("error", "text", "fields"), REFUSED, ids=[re.sub(r"\W+", "-", text) for _, text, _ in REFUSED]
)
def test_refused_before_anything_changes(
    error: type[Exception], text: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    monitor = Monitor(sinks=[JSONL(path)])
    monitor.observe(step=1, loss=1.0)
    state, log = monitor.state_dict(), path.read_bytes()
    with pytest.raises(error, match=text):
        monitor.observe(**{"step": 1, **fields})
    assert monitor.state_dict() == state
    assert path.read_bytes() == log


def test_a_step_is_needed_by_name() -> None:
    with pytest.raises(TypeError, match="step"):
        Monitor().observe(loss=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Monitor().observe(1, None)  # type: ignore[call-arg]


def test_nothing_is_left_to_flush() -> None:
    monitor = Monitor()
    monitor.observe(step=0, loss=torch.tensor(math.nan))
    assert monitor.flush() == []


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled-by-the-user"])
def test_the_loss_scale_of_a_step_is_that_before_the_update(unscaled: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0 * 2**10, growth_interval=2)
    clipper, sink = fastclip.GradClipper([weight]), Kept()
    monitor = Monitor([], [sink], telemetry=Telemetry(lag=2))
    for step, factor in enumerate((1.0, 1.0, math.inf, 1.0)):
        scaler.scale(weight.sum() * factor).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        stats = clipper.step(optimizer, scaler)
        scaler.update()
        optimizer.zero_grad()
        monitor.observe(step=step, stats=stats.cpu())
    monitor.flush()
    scales = [record.loss_scale for record in sink.records]
    assert scales == pytest.approx([3072.0, 3072.0, 6144.0, 3072.0], rel=2**-23)
    assert [record.skipped for record in sink.records] == [False, False, True, False]
