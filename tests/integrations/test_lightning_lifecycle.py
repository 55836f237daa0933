"""Lightning: fits within fits, fits that raise, and optimizers that come, go and take turns."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from fastclip.integrations.lightning import GradClipCallback
from fastclip.monitor import JSONL, Monitor, NonFinite, RollbackPolicy, Telemetry
from tests.integrations.lightning_runs import (
    SILENT,
    Alarm,
    Batches,
    Net,
    Validated,
    loader,
    moved,
    parameters,
    trainer,
)

pytestmark = [
    *SILENT,
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


class Tuned(Validated):
    def __init__(self) -> None:
        super().__init__(lambda own: torch.optim.AdamW(own, lr=self.lr))
        self.lr, self.batch_size = 1e-3, 2

    def train_dataloader(self) -> Any:
        data = Batches(8).batches.flatten(0, 1)
        return DataLoader(data, batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return loader(1)


class Between(LearningRateFinder):
    """Looks for a learning rate before the second epoch."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def watched(log: Path, **changed: Any) -> GradClipCallback:
    return GradClipCallback(1.0, monitor=Monitor(sinks=[JSONL(log)]), **changed)


def rolling_back(monitor: Monitor) -> GradClipCallback:
    policy = RollbackPolicy(confirm=0, before=0, lr_scale=0.5, lr_steps=2)
    return GradClipCallback(
        *(5.0,),
        nonfinite="propagate",
        monitor=monitor,
        on_critical=policy,
        checkpoint_every=2,
    )


def counted(callback: GradClipCallback) -> list[int]:
    return [int(each.counters()["steps"]) for each in callback.clippers]


@pytest.mark.parametrize(
    "finder",
    [
        lambda: LearningRateFinder(num_training_steps=8),
        lambda: BatchSizeFinder(max_trials=2, steps_per_trial=2),
        lambda: Between(num_training_steps=8),
    ],
    ids=["learning rate", "batch size", "between epochs"],
)
@pytest.mark.parametrize("first", [True, False], ids=["finder first", "finder last"])
def test_what_a_tuner_tries_is_not_counted(first: bool, finder: Any, tmp_path: Path) -> None:
    callback = watched(tmp_path / "run.jsonl")
    callbacks = [finder(), callback] if first else [callback, finder()]
    run = trainer(tmp_path, *callbacks, max_epochs=2)
    run.fit(Tuned())
    steps = run.global_step
    saved = callback.state_dict()

    assert steps in (16, 32)
    assert counted(callback) == [steps]
    assert int(saved["clippers"][0]["counters"]["steps"]) == steps
    assert saved["monitors"][0]["step"] == steps - 1
    assert [record.step for record in JSONL(tmp_path / "run.jsonl")] == list(range(steps))


def test_optimizers_that_take_turns_are_all_logged(tmp_path: Path) -> None:
    class Turns(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[n].parameters(), 1e-3) for n in (0, 2)]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            several: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            if batch_idx % 3 != 1:
                several[bool(batch_idx % 3)].step()
            for each in several:
                each.zero_grad()

    logger = CSVLogger(tmp_path)
    callback = GradClipCallback(1.0, log_every=4, layers=None)
    trainer(tmp_path, callback, logger=logger).fit(Turns(manual=True), loader(16))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [
        [int(row["step"]) for row in rows if row[f"optimizer_{n}/grad_norm"]] for n in range(2)
    ]

    # of batches 0, 3, .. 15 and of 2, 5, .. 14, the first each after 4, 8, 12 and 16 batches
    assert steps == [[3, 9, 12, 15], [5, 8, 11]]


@pytest.mark.parametrize("value", [float("nan"), 1.0], ids=["bad", "finite"])
def test_a_step_that_raises_leaves_no_flag_behind(value: float, tmp_path: Path) -> None:
    class Failing(Net):
        fails = True

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.fails:
                raise RuntimeError("the module's own hook")

    module = Failing()
    kept = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9, fused=True)
    module.make = lambda _: kept
    before, callback = parameters(module), GradClipCallback(0.5)
    with pytest.raises(RuntimeError, match="the module's own hook"):
        trainer(tmp_path, callback).fit(module, loader(1, {0: value}))
    assert not {"grad_scale", "found_inf"} & vars(kept).keys()
    assert not kept._optimizer_step_post_hooks

    module.fails = False
    trainer(tmp_path, callback).fit(module, loader(1))
    assert moved(before, module) == pytest.approx(0.005, rel=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_learning_rate_is_that_of_the_step(precision: str, tmp_path: Path) -> None:
    class Warming(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (batch_idx + 1)

    log = tmp_path / "run.jsonl"
    callback = rolling_back(Monitor([Alarm(3)], [JSONL(log)]))
    trainer(tmp_path, callback, precision=precision).fit(Warming(), loader(7))

    rates = [(record.step, record.lr) for record in JSONL(log) if record.attempt]
    # 4 batches have gone by, of which 2 updates are left; the next 2 have half the rate
    expected = [(2, 0.0025), (3, 0.003), (4, 0.007)]
    assert [step for step, _ in rates] == [step for step, _ in expected]
    assert [rate for _, rate in rates] == pytest.approx([rate for _, rate in expected])


class Renewed(Net):
    """Has other optimizers in the second epoch."""

    count = 1

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 1e-3) for _ in range(self.count)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.automatic_optimization:
            return self.loss(batch)
        self.manual_backward(loss := self.loss(batch))
        for optimizer in self.trainer.strategy._lightning_optimizers:
            optimizer.step()
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.count += not self.automatic_optimization
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_optimizers_that_are_replaced_are_clipped_for(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    callback = watched(log)
    trainer(tmp_path, callback, max_epochs=2).fit(Renewed(), loader(3))

    assert counted(callback) == [6]
    assert [(record.step, record.lr) for record in JSONL(log)] == [(n, 1e-3) for n in range(6)]


def test_optimizers_that_others_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, rolling_back(Monitor([Alarm(3)])), max_epochs=2)
    with pytest.raises(RuntimeError, match="optimizers were replaced, and the states that a roll"):
        run.fit(Renewed(), loader(3))
    run = trainer(tmp_path, GradClipCallback(monitor=Monitor()), max_epochs=2)
    with pytest.raises(ValueError, match="monitor has 1 for 2 optimizers"):
        run.fit(Renewed(manual=True), loader(3))


def test_every_evaluation_of_a_closure_is_clipped(tmp_path: Path) -> None:
    def lbfgs(own: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(own, lr=1e-3, max_iter=4)

    ours, theirs, callback = Net(lbfgs), Net(lbfgs), GradClipCallback(0.5)
    trainer(tmp_path, callback).fit(ours, loader(3))
    trainer(tmp_path, gradient_clip_val=0.5).fit(theirs, loader(3))

    assert ours.losses == theirs.losses
    assert counted(callback) == [len(ours.losses)]
    assert len(ours.losses) > 3


def test_a_fit_from_the_start_counts_from_0_whatever_was_loaded(tmp_path: Path) -> None:
    run = trainer(tmp_path, rolling_back(Monitor([Alarm(3)])))
    run.fit(Net(), loader(4))
    assert run.callbacks[0].state_dict()["undone"] == 2  # type: ignore[attr-defined]
    run.save_checkpoint(tmp_path / "saved.ckpt")

    callback = rolling_back(Monitor([Alarm(3)]))
    run = trainer(tmp_path, callback)
    run.validate(Validated(), loader(1), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
    seen: list[int] = []

    class Steps(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(callback.monitors[0].state_dict()["step"])  # type: ignore[union-attr]

    run.callbacks.append(Steps())  # type: ignore[attr-defined]
    run.fit(Net(), loader(3))
    assert seen == [0, 1, 2]


def test_a_resumed_run_knows_of_the_rollback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate stays cut as long as in the run that was not stopped, and the rollback
    counts."""

    def run(epochs: int, log: Path, **resumed: Any) -> tuple[Net, GradClipCallback]:
        module = Net(lambda own: torch.optim.SGD(own, 0.01, momentum=0.9))
        own = rolling_back(Monitor([NonFinite()], [JSONL(log)]))
        saving = ModelCheckpoint(log.with_suffix(""), every_n_epochs=1, save_top_k=-1)
        each = trainer(tmp_path, own, saving, max_epochs=epochs, enable_checkpointing=True)
        each.fit(module, loader(4, {3: float("nan")}), **resumed)
        return module, own

    whole, _ = run(2, tmp_path / "whole.jsonl")
    run(1, tmp_path / "parts.jsonl")
    caplog.clear()
    (saved,) = (tmp_path / "parts").glob("epoch=0*.ckpt")
    module, own = run(2, tmp_path / "parts.jsonl", ckpt_path=str(saved))

    # each epoch ends with a batch that is taken back, and the one before it; 2 steps are cut
    records = list(JSONL(tmp_path / "parts.jsonl"))
    assert [(record.attempt, record.step) for record in records] == [
        *((0, step) for step in range(4)),
        *((1, step) for step in range(2, 6)),
    ]
    assert [record.lr for record in records] == pytest.approx([0.01] * 4 + [0.005] * 2 + [0.01] * 2)
    losses = [record.loss for record in JSONL(tmp_path / "whole.jsonl")]
    assert [record.loss for record in records] == pytest.approx(losses, abs=0, nan_ok=True)
    assert all(map(torch.equal, parameters(module), parameters(whole)))
    assert own.rollbacks == 2
    assert "rollback 2 of at most 3" in caplog.text


@pytest.mark.parametrize("lag", [0, 2])
def test_an_alarm_that_comes_late_goes_back_before_the_next_state(lag: int, tmp_path: Path) -> None:
    """As one of numbers on a device, which is here asked for when a state is due after step 3."""

    class Warming(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (batch_idx + 1)

    monitor = Monitor([Alarm(3)], [JSONL(tmp_path / "run.jsonl")], telemetry=Telemetry(lag))
    own, logger = rolling_back(monitor), CSVLogger(tmp_path)
    run = trainer(tmp_path, own, logger=logger, log_every_n_steps=1)
    run.fit(Warming(), loader(8))
    rates = [record.lr for record in JSONL(tmp_path / "run.jsonl") if record.attempt]
    assert rates == pytest.approx([0.0025, 0.003, 0.007, 0.008])
    assert own.state_dict()["undone"] == 2
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert {float(row["grad_clipped"]) for row in csv.DictReader(file)} <= {0.0, 1.0}


def test_a_fit_from_the_start_knows_of_no_rollback(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    own = rolling_back(Monitor([NonFinite()], [JSONL(log)]))
    for _ in range(2):
        trainer(tmp_path, own).fit(Net(), loader(6, {3: float("nan")}))
        assert own.rollbacks == 1
    rates = [record.lr for record in JSONL(log)]
    assert rates == pytest.approx(([0.01] * 4 + [0.005] * 2) * 2)


def test_the_learning_rate_that_there_is_not_is_told_of(tmp_path: Path) -> None:
    def without(own: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(own, 0.01)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    class Never(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int:
            return -1  # ends the epoch

    with pytest.warns(UserWarning, match=r"SGD has no learning rate .* lr_scale=0\.5 after a roll"):
        trainer(tmp_path, rolling_back(Monitor())).fit(Never(without), loader(1))


def test_another_callback_that_clips_is_refused(tmp_path: Path) -> None:
    """Lightning itself refuses two of the same class, if it is given them at once."""

    class Other(GradClipCallback):
        pass

    module = Net()
    before = parameters(module)
    with pytest.raises(RuntimeError, match="clipped twice, by two callbacks of the kind GradClip"):
        trainer(tmp_path, GradClipCallback(1.0), Other(0.5)).fit(module, loader(2))
    run = trainer(tmp_path, GradClipCallback(1.0))
    run.callbacks.append(GradClipCallback(0.5))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="clipped twice, by two callbacks of the kind GradClip"):
        run.fit(module, loader(2))
    assert all(map(torch.equal, parameters(module), before))
