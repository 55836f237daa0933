"""What the callbacks say of steps that are skipped, and a run of them as a critical event."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import Trainer

from fastclip import GradClipper
from fastclip.integrations import lightning, transformers
from fastclip.integrations._entries import Entries
from fastclip.monitor import JSONL, Monitor, RollbackPolicy, Skips, StepRecord, default_detectors
from fastclip.stats import GradStats
from tests.integrations import lightning_runs, trainer
from tests.integrations.lightning_runs import KINDS, SILENT, Net, loader

pytestmark = SILENT
ALL = range(1000)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fastclip"]


def lightning_run(
    folder: Path,
    spoilt: Any,
    steps: int,
    kind: str = "fused",
    precision: str = "32-true",
    **own: Any,
) -> Any:
    net = Net(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **KINDS[kind]))
    run = lightning_runs.trainer(
        folder, lightning.GradClipCallback(1.0, **own), precision=precision
    )
    run.fit(net, loader(steps, {place: math.nan for place in spoilt if place < steps}))
    return run


def transformers_run(folder: Path, spoilt: Any, steps: int, **own: Any) -> Any:
    net = trainer.spoiled(trainer.model(), spoilt, math.nan)
    run = trainer.trainer(
        folder, transformers.GradClipCallback(1.0, **own), net=net, max_steps=steps
    )
    run.train()
    return run


def test_transformers_tells_of_each_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = transformers_run(tmp_path, {3, 5, 20}, 22)
    elements = sum(each.numel() for each in run.model.parameters())
    last = "the last parameter with some, nearest the cause, is transformer.ln_f.bias"
    assert told(caplog) == [
        f"step {step} is skipped: {elements} gradient elements are NaN or infinite; {last}"
        for step in (3, 20)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_lightning_tells_of_each_incident(
    kind: str, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lightning_run(tmp_path, {3, 5, 20}, 22, kind, precision)
    elements = sum(each.numel() for each in Net().parameters())
    last = "the last parameter with some, nearest the cause, is net.2.bias"
    assert told(caplog) == [
        f"step {step} is skipped: {elements} gradient elements are NaN or infinite; {last}"
        for step in (3, 20)
    ]


def steps_of(run: Any) -> int:
    steps: int = (run.state if isinstance(run, Trainer) else run).global_step
    return steps


@pytest.mark.parametrize("run", [transformers_run, lightning_run])
def test_a_run_that_skips_everything_says_so_and_stops_where_that_is_critical(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", ALL, 12, monitor=Monitor(), on_critical="stop")
    assert steps_of(whole) == 12
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith("step 0 is skipped: ")

    monitor = Monitor([*default_detectors(), Skips(streak=5)])
    ended = run(tmp_path / "ended", ALL, 12, monitor=monitor, on_critical="stop")
    assert steps_of(ended) == 5
    assert told(caplog)[2] == (
        "stopping the training: step 4 (onset 0): critical: skips, the last 5 updates were skipped"
    )


@pytest.mark.parametrize("run", [transformers_run, lightning_run])
def test_a_policy_goes_back_for_a_run_of_skips(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "run.jsonl"
    monitor = Monitor([*default_detectors(), Skips(streak=3)], [JSONL(log)])
    policy = RollbackPolicy(confirm=0, max_rollbacks=1)
    run(tmp_path, {6, 7, 8}, 12, monitor=monitor, on_critical=policy, checkpoint_every=5)
    monitor.close()
    assert {record.batch for record in JSONL(log) if record.attempt == 0} == set(range(9))
    assert sum("rolling back from the alarm at step 8" in each for each in told(caplog)) == 1


def test_what_the_host_does_not_know_is_told_with_the_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clipper, entries = GradClipper(model, max_norm=1.0), Entries(None)
    entries.begin(clipper)

    def clipped(steps: range, bad: set[int]) -> GradStats:
        for step in steps:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0)
            if step in bad:
                next(model.parameters()).grad[1, 0] = math.nan  # type: ignore[index]
            stats = clipper.clip_()
        return stats

    made = entries.made(clipper, clipped(range(6), {1, 5}), 5)
    assert made["grad_skipped"] == 2
    entries.made(clipper, clipped(range(6, 10), {8}), 9)  # of the same incident
    entries.made(clipper, clipped(range(10, 40), set()), 39)
    entries.made(clipper, clipped(range(40, 60), {50, 51}), 59)
    clipped(range(60, 100), {99})  # a row with some again, so the incident may go on
    for _ in range(2):
        entries.end(clipper, 99)
    entries.begin(clipper)  # another training
    clipped(range(3), {1})
    for _ in range(2):
        entries.end(clipper, 2)
    one = "1 gradient element is NaN or infinite; the last parameter with some, nearest the cause"
    assert told(caplog) == [
        f"step 5 is skipped: {one}, is 0.weight",
        "of the 20 steps up to step 59, 2 were skipped: NaN or infinite gradients",
        "of the 3 steps up to step 2, 1 was skipped: NaN or infinite gradients",
    ]


def test_a_loss_that_compute_loss_makes_is_seen_in_the_gradients(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 2 else loss

    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")])
    own = transformers.GradClipCallback(1.0, monitor=monitor)
    run = trainer.trainer(tmp_path, own, kind=Own, max_steps=4)
    run.train()
    monitor.close()
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert all(record.loss is not None and math.isfinite(record.loss) for record in records)
    assert [bool(record.nonfinite_count) for record in records] == [False, False, True, False]
    events = Monitor().replay(records)
    assert {(event.step, event.metric) for event in events} == {
        (2, "grad_norm"),
        (2, "nonfinite_count"),
    }


def test_the_batch_of_a_record_counts_over_epochs(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with Monitor(sinks=[JSONL(log)]) as monitor:
        run = lightning_runs.trainer(
            *(tmp_path, lightning.GradClipCallback(monitor=monitor)),
            max_epochs=2,
            accumulate_grad_batches=2,
        )
        run.fit(Net(), loader(5))
    assert [record.batch for record in JSONL(log)] == [1, 3, 4, 6, 8, 9]


def test_a_resumed_run_has_the_same_records_but_for_rows_of_layers(tmp_path: Path) -> None:
    """The 100 records in which a kind of event brings no rows again are of one Monitor."""

    def run(log: Path, **changed: Any) -> list[StepRecord]:
        with Monitor(sinks=[JSONL(log)]) as monitor:
            callback = lightning.GradClipCallback(1.0, monitor=monitor)
            saving = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
            each = lightning_runs.trainer(
                tmp_path, callback, saving, enable_checkpointing=True, max_epochs=2
            )
            each.fit(Net(), loader(9, {3: math.nan}), **changed)
        return list(JSONL(log))

    whole = run(tmp_path / "whole.jsonl")
    resumed = run(tmp_path / "resumed.jsonl", ckpt_path=str(tmp_path / "epoch=0-step=9.ckpt"))
    assert [replace(record, layers=None) for record in resumed] == [
        replace(record, layers=None) for record in whole[9:]
    ]
    assert [record.step for record in whole if record.layers] == [3]
    assert [record.step for record in resumed if record.layers] == [12]
