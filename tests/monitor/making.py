"""Records to test with: a real run, and healthy synthetic ones to put failures into."""

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastclip.cli import main
from fastclip.monitor import Detector, Event, StepRecord

MIXTRAL = Path(__file__).resolve().parent.parent / "data/mixtral_8x7b_a100_loss.csv"


def mixtral() -> list[StepRecord]:
    with MIXTRAL.open(newline="") as file:
        return [StepRecord(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def healthy(steps: int, seed: int = 0) -> list[StepRecord]:
    """Every metric, with the noise that real ones have: norms spread by factors."""
    return list(_healthy(steps, seed))


@cache
def _healthy(steps: int, seed: int) -> list[StepRecord]:
    noise = random.Random(seed)
    made = []
    for step in range(steps):
        norm = noise.lognormvariate(0, 0.25)
        made.append(
            StepRecord(
                step,
                loss=2 + 3 * math.exp(-step / 300) + noise.gauss(0, 0.03),
                val_loss=2.1 + 3 * math.exp(-step / 300) if step % 50 == 0 else None,
                grad_norm=norm,
                clip_coef=min(1.0, 1.5 / norm),
                clipped=norm > 1.5,
                lr=3e-4 * min(1.0, (step + 1) / 100),
                loss_scale=65536.0,
                nonfinite_count=0,
                skipped=False,
                activation_max=noise.lognormvariate(2, 0.1),
                param_norm=100 + 0.01 * step + noise.gauss(0, 0.01),
                update_ratio=1e-3 * noise.lognormvariate(0, 0.2),
                batch=step,
            )
        )
    return made


def changed(records: Iterable[StepRecord], *changes: tuple[Iterable[int], str, Any]) -> Any:
    """The records with some fields set; a number from a function of the old value."""
    made = list(records)
    for steps, name, value in changes:
        for step in steps:
            new = value(getattr(made[step], name)) if callable(value) else value
            made[step] = replace(made[step], **{name: new})
    return made


def times(factor: float) -> Any:
    return lambda value: factor * value


def incident_log(steps: int = 2000) -> list[StepRecord]:
    """Something of everything: spikes, NaN, missing values, a slow rise, clipping, overflows."""
    return list(_incident_log()[:steps])


@cache
def _incident_log() -> list[StepRecord]:
    records: list[StepRecord] = changed(
        healthy(2000, seed=1),
        (range(150, 152), "loss", times(2)),
        (range(300, 310), "loss", times(1.8)),
        ([500, 501, 777], "loss", math.nan),
        ([502], "grad_norm", math.inf),
        (range(600, 640), "grad_norm", None),
        ([700], "activation_max", times(20)),
        ([703], "loss", times(1.7)),
        (range(900, 1000), "clipped", True),
        (range(1100, 1400, 30), "loss_scale", 32768.0),
        ([1100, 1130], "nonfinite_count", 5),
        ([1100], "skipped", True),
        (range(1500, 1900), "loss", lambda loss: loss * 1.3),
        ([1950], "update_ratio", -math.inf),
    )
    return records


def verdicts(detector: Detector, records: Iterable[StepRecord]) -> list[Event]:
    """The events of a detector alone."""
    state = detector.init()
    found = []
    for record in records:
        state, events = detector(state, record)
        found += events
    return found


def of_loss(values: Iterable[float | None]) -> list[StepRecord]:
    return [StepRecord(step, loss) for step, loss in enumerate(values)]


def require_refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong input is one line on stderr, which begins with `text`, and status 2."""
    try:
        status = main(command.split())
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith(f"fastclip: {text}")
    assert err.count("\n") == 1
