"""Lightning: what the callback logs, what the monitor is told, and what is done about events."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from fastclip import GradClipper
from fastclip.integrations.lightning import GradClipCallback
from fastclip.monitor import JSONL, Monitor, NonFinite, RollbackPolicy, StepRecord
from fastclip.rules import ZClip
from tests.integrations.lightning_runs import (
    SILENT,
    Alarm,
    Net,
    Start,
    Validated,
    loader,
    norm,
    parameters,
    trainer,
)

pytestmark = SILENT


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    """Of the log, those that the callback wrote, without what is empty."""
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        kept = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in kept if any(name.endswith("grad_norm") for name in row)]


def test_the_log_has_the_norm_before_clipping(tmp_path: Path) -> None:
    norms: list[float] = []
    parts: list[float] = []

    class Measuring(Net):
        def on_after_backward(self) -> None:
            norms.append(norm([each.grad for each in self.parameters() if each.grad is not None]))
            last = self.net[2]
            assert isinstance(last, nn.Linear)
            assert last.weight.grad is not None
            assert last.bias.grad is not None
            parts.append(norm([last.weight.grad, last.bias.grad]))

    logger = CSVLogger(tmp_path)
    callback = GradClipCallback(max_norm=5.0, layers=2)
    run = trainer(tmp_path, callback, logger=logger, log_every_n_steps=2)
    run.fit(Measuring(), loader(6, {3: float("inf")}))
    logged = rows(logger)

    assert [int(row["step"]) for row in logged] == [1, 3, 5]
    assert float(logged[0]["grad_norm"]) == pytest.approx(norms[1], rel=1e-6)
    assert float(logged[0]["grad_norm/net.2"]) == pytest.approx(parts[1], rel=1e-6)
    assert float(logged[0]["grad_clip_coef"]) == pytest.approx(5.0 / (norms[1] + 1e-6), rel=1e-6)
    assert int(float(logged[1]["grad_nonfinite"])) > 0
    assert float(logged[1]["grad_clip_coef"]) == 1.0
    assert [float(row["grad_skipped"]) for row in logged] == [0, 1, 0]
    assert [float(row["grad_clipped"]) for row in logged] == [1, 0.5, 1]
    assert {name for name in logged[2] if "/" in name} == {
        f"{column}/net.{n}" for column in ("grad_norm", "grad_max") for n in (0, 2)
    }


def test_how_often_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run = trainer(tmp_path, GradClipCallback(log_every=3, layers=None), logger=logger)
    run.fit(Net(), loader(7))

    assert [int(row["step"]) for row in rows(logger)] == [2, 5]
    assert not any("/" in name for row in rows(logger) for name in row)


def test_two_optimizers_have_rows_and_monitors_of_their_own(tmp_path: Path) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[n].parameters(), 1e-3) for n in (0, 2)]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            several: Any = self.optimizers()
            first, second = several
            self.manual_backward(loss)
            first.step()
            for _ in range(2):
                second.step()
            for each in (first, second):
                each.zero_grad()
            return loss

    logger = CSVLogger(tmp_path)
    logs = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    monitors = [Monitor(sinks=[JSONL(log)]) for log in logs]
    callback = GradClipCallback(max_norm=1.0, monitor=monitors, log_every=1)
    trainer(tmp_path, callback, logger=logger).fit(Two(manual=True), loader(3))
    for monitor in monitors:
        monitor.close()

    steps = [[record.step for record in JSONL(log)] for log in logs]
    assert steps == [[0, 3, 6], [1, 2, 4, 5, 7, 8]]
    norms = [[record.grad_norm for record in JSONL(log)] for log in logs]
    logged = rows(logger)
    assert [float(row["optimizer_0/grad_norm"]) for row in logged] == pytest.approx(norms[0])
    assert [float(row["optimizer_1/grad_norm"]) for row in logged] == pytest.approx(norms[1][1::2])


def test_the_monitor_is_told_of_every_update(tmp_path: Path) -> None:
    class Scheduled(Validated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1e-3)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    log = tmp_path / "run.jsonl"
    module = Scheduled()
    with Monitor(sinks=[JSONL(log)]) as monitor:
        callback = GradClipCallback(max_norm=1.0, monitor=monitor)
        run = trainer(
            tmp_path,
            callback,
            precision="16-mixed",
            accumulate_grad_batches=2,
            val_check_interval=4,
        )
        run.fit(module, loader(8), loader(1))
    records = list(JSONL(log))

    assert [record.step for record in records] == [0, 1, 2, 3]
    assert {record.attempt for record in records} == {0}
    # of one validation by Lightning, the loss of each training step comes first
    pairs = [sum(module.losses[n : n + 2]) / 2 for n in range(0, 8, 2)]
    assert [record.loss for record in records] == pytest.approx(pairs)
    assert [record.lr for record in records] == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])
    assert [record.loss_scale for record in records] == [64.0] * 4
    assert [record.val_loss is None for record in records] == [True, True, False, True]
    assert all(record.clipped for record in records)


def test_a_critical_event_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor([Alarm(3)])
    run = trainer(tmp_path, GradClipCallback(monitor=monitor, on_critical="stop"))
    run.fit(Net(), loader(8))
    assert run.global_step == 4
    assert "stopping the training: step 3: critical: alarm" in caplog.text


def test_an_incident_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor([Alarm(3), Alarm(4), Alarm(6), Alarm(20)])
    run = trainer(tmp_path, GradClipCallback(monitor=monitor))
    run.fit(Net(), loader(24))
    assert run.global_step == 24
    told = [record.getMessage() for record in caplog.records if record.name == "fastclip"]
    assert told == [f"step {step}: critical: alarm, grad_norm" for step in (3, 20)]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_resumed_run_is_the_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    def run(
        count: int, log: Path, **changed: Any
    ) -> tuple[Net, GradClipCallback, list[StepRecord]]:
        module = Net()
        with Monitor(sinks=[JSONL(log)]) as monitor:
            callback = GradClipCallback(rule=ZClip(warmup=3), monitor=monitor)
            saving = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1)
            each = trainer(
                tmp_path,
                *(callback, saving),
                precision=precision,
                max_epochs=count,
                enable_checkpointing=True,
            )
            each.fit(module, loader(6), **changed)
        return module, callback, list(JSONL(log))

    whole, callback, records = run(4, tmp_path / "whole.jsonl")
    run(2, tmp_path / "parts.jsonl")
    last = str(next((tmp_path / "saved").glob("epoch=1*-v1.ckpt")))
    module, resumed, parts = run(4, tmp_path / "parts.jsonl", ckpt_path=last)

    for ours, theirs in zip(parameters(module), parameters(whole), strict=True):
        assert torch.equal(ours, theirs)
    assert parts == records
    assert len(records) == 24
    at_end, expected = resumed.state_dict(), callback.state_dict()
    assert at_end["monitors"] == expected["monitors"]
    assert repr(at_end["clippers"]) == repr(expected["clippers"])


def test_fitting_twice_goes_on(tmp_path: Path) -> None:
    module = Validated()
    monitor = Monitor()
    callback = GradClipCallback(rule=ZClip(warmup=3), monitor=monitor)
    run = trainer(tmp_path, callback)
    run.fit(module, loader(5), loader(1))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(5), loader(1))

    assert int(callback.clippers[0].counters()["steps"]) == 10
    assert (monitor.state_dict()["step"], monitor.attempt) == (9, 0)


def test_validating_alone_changes_nothing(tmp_path: Path) -> None:
    callback = GradClipCallback(monitor=Monitor())
    before = repr(callback.state_dict())
    trainer(tmp_path, callback).validate(Validated(), loader(2), verbose=False)

    assert repr(callback.state_dict()) == before


def test_a_rollback_goes_on_with_the_following_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sgd(own: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(own, 0.01, momentum=0.9)

    log = tmp_path / "run.jsonl"
    module, policy = Net(sgd), RollbackPolicy(confirm=0, before=0, lr_scale=1.0, max_rollbacks=1)
    with Monitor([NonFinite()], [JSONL(log)]) as monitor:
        callback = GradClipCallback(
            *(5.0,),
            nonfinite="propagate",
            monitor=monitor,
            on_critical=policy,
            checkpoint_every=3,
        )
        run = trainer(tmp_path, callback)
        run.fit(module, loader(10, {5: float("nan")}))
    expected = Net(sgd)
    kept = loader(10)
    batches: Any = kept.dataset
    batches.batches = batches.batches[[0, 1, 2, 6, 7, 8, 9]]  # 3 to 5 were taken back
    trainer(tmp_path, GradClipCallback(5.0)).fit(expected, kept)

    for ours, theirs in zip(parameters(module), parameters(expected), strict=True):
        assert torch.equal(ours, theirs)
    assert run.global_step == 10
    assert callback.rollbacks == 1
    steps = [(record.attempt, record.step) for record in JSONL(log)]
    assert steps == [(0, n) for n in range(6)] + [(1, n) for n in range(3, 7)]
    assert "rolling back from the alarm at step 5" in caplog.text
    assert not list(tmp_path.glob("fastclip-rollback-*"))


def test_a_rollback_after_the_last_batch_and_one_too_many(tmp_path: Path) -> None:
    def callback() -> GradClipCallback:
        policy = RollbackPolicy(confirm=0, before=0, max_rollbacks=1)
        return GradClipCallback(
            nonfinite="propagate",
            monitor=Monitor([NonFinite()]),
            on_critical=policy,
            checkpoint_every=2,
        )

    module = Start("plain", False)
    once = callback()
    trainer(tmp_path, once).fit(module, loader(4, {3: float("nan")}))
    assert all(each.isfinite().all() for each in parameters(module))
    assert once.rollbacks == 1

    with pytest.raises(RuntimeError, match="all are used: 1 of at most 1"):
        trainer(tmp_path, callback()).fit(
            Start("plain", False), loader(6, {1: float("nan"), 4: float("nan")})
        )
    assert not list(tmp_path.glob("fastclip-rollback-*"))


def test_what_is_refused(tmp_path: Path) -> None:
    class FSDPStrategy(SingleDeviceStrategy):
        """As far as the callback looks."""

    class Overriding(Net):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            raise AssertionError("training has started")

    class Without(Net):
        def configure_optimizers(self) -> None:
            pass

    def refused(kind: type[Exception], match: str, run: Any, module: Net) -> None:
        before = parameters(module)
        with pytest.raises(kind, match=match):
            run.fit(module, loader(2))
        assert all(map(torch.equal, parameters(module), before))

    clips = trainer(tmp_path, GradClipCallback(), gradient_clip_val=1.0)
    refused(RuntimeError, r"clipped twice, by Trainer\(gradient_clip_val=1.0\)", clips, Net())
    flat = trainer(tmp_path, GradClipCallback(), strategy=FSDPStrategy(torch.device("cpu")))
    refused(RuntimeError, "cannot clip under FSDPStrategy", flat, Net())
    again = trainer(tmp_path, GradClipCallback())
    refused(
        RuntimeError, "by configure_gradient_clipping of Overriding and by", again, Overriding()
    )
    refused(RuntimeError, "configure_optimizers returned no optimizer", again, Without())
    two = trainer(tmp_path, GradClipCallback(monitor=[Monitor(), Monitor()]))
    refused(ValueError, "monitor has 2 for 1 optimizers", two, Net())
    back = GradClipCallback(monitor=Monitor(), on_critical=RollbackPolicy())
    refused(
        *(ValueError, "needs one optimizer and automatic optimisation"),
        *(trainer(tmp_path, back), Net(manual=True)),
    )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm"),
        ({"nonfinite": "never"}, ValueError, "nonfinite"),
        ({"monitor": 3}, TypeError, "monitor must be a Monitor or a list of them, got 3"),
        ({"on_critical": "panic"}, ValueError, "on_critical must be .* got 'panic'"),
        ({"on_critical": RollbackPolicy()}, ValueError, "and there is none"),
        ({"monitor": [None], "on_critical": "stop"}, ValueError, "and there is none"),
        ({"log_every": -1}, ValueError, "log_every must be a whole number of at least 0, or None"),
        ({"layers": 1.5}, TypeError, "layers must be a whole number of .* or None, got 1.5"),
        ({"layers": 0}, ValueError, "layers must be .* got 0"),
        ({"keep": 0}, ValueError, "keep must be .* at least 1, got 0"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every must be .* at least 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_are_checked(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradClipCallback(**options)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    callback = GradClipCallback()
    two = [GradClipper([]).state_dict() for _ in range(2)]
    callback.load_state_dict(
        {"clippers": two, "monitors": [], "counted": [{}, {}], "rollbacks": [], "undone": 0}
    )
    with pytest.raises(ValueError, match=r"the state of 2 clippers, and this .* has 1"):
        trainer(tmp_path, callback).fit(Net(), loader(1))


def test_nothing_is_told_at_a_level_below(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "fastclip")
    trainer(tmp_path, GradClipCallback(monitor=Monitor())).fit(Net(), loader(3))
    assert not [record for record in caplog.records if record.name == "fastclip"]
