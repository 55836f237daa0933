"""Lightning: a callback that clips, logs, watches, and stops or goes back.

Works with ``lightning.pytorch`` and with ``pytorch_lightning``: it is a callback of the one that is
imported already, else of the one that is installed.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import le
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from fastclip.checks import require
from fastclip.clipper import GradClipper
from fastclip.integrations._clipping import BeforeStep
from fastclip.integrations._trainers import (
    inner_of,
    monitors_of,
    require_going_back,
    require_monitors,
    require_suitable,
    scaler_of,
)
from fastclip.integrations.rollbacks import Rollbacks
from fastclip.monitor import Event, Monitor, RollbackPolicy
from fastclip.monitor.sinks.scalars import sentence
from fastclip.policy import Policy
from fastclip.rules import Rule


def _framework() -> str:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return name
    for name in names:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError("fastclip.integrations.lightning needs lightning: pip install lightning")


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = import_module(_framework()).Callback

__all__ = ["GradClipCallback"]

KEPT = 3  # confirmed states to go back to


class GradClipCallback(Callback):
    """Clips before every step of an optimizer, in automatic and in manual optimisation.

    >>> trainer = Trainer(callbacks=[GradClipCallback(max_norm=1.0)])

    Each optimizer has a `GradClipper` of its own, for the parameters that it has, under their names
    in the module; parameters that are added later are clipped as well. Gradients are rescaled in
    place before the optimizer sees them. Under ``precision="16-mixed"`` they are clipped unscaled:
    where a fused optimizer is to take the loss scale out itself, which Lightning's own clipping
    refuses, the callback takes it out in the same write.

    A step with NaN or infinite gradients is not taken (`nonfinite`): a fused optimizer and a
    GradScaler are handed the flag, and for others it is read, once per step, and the gradients are
    set to None. `trainer.global_step` counts such a step all the same.

    Args:
        max_norm: the threshold of each optimizer, as of `GradClipper`.
        rule: instead of it.
        norm_type: the order of the norm.
        nonfinite: what to do about NaN and infinities.
        monitor: a `Monitor` that is told of every update; with several optimizers, one for each in
            their order, None for one that is not watched. `step` is the trainer's `global_step`
            without the updates that were taken back, `loss` what ``training_step`` returned (in
            automatic optimisation summed over accumulated batches, which Lightning has divided by
            their number), `lr` that of the first parameter group.
        log_every: updates between two rows in the trainer's loggers; None means as often as
            ``Trainer(log_every_n_steps=...)`` says, 0 never.
        depth: the rows have the norm of each group of gradients whose names agree in their first
            `depth` parts; 0 leaves those out.
        on_critical: what to do about an event of level "critical": ``"stop"`` ends the training as
            early stopping does, ``"ignore"`` leaves it to the monitor's sinks, and a
            `RollbackPolicy` goes back in place (it says itself which events do that). All but
            ``"ignore"`` say so by the logger "fastclip". Going back needs one process, one
            optimizer and automatic optimisation.
        checkpoint_every: updates between two states to go back to.
        val_loss: under which name the module logs its validation loss, for the next record.

    What a rollback restores, before the next batch, validation or checkpoint: the module, the
    optimizer's state, the GradScaler, random number generators, clipper and monitor. Not taken back
    are the batches (Lightning goes on with the following ones, so the suspect ones are passed
    over), `trainer.global_step`, the epoch, the learning rate's schedule (the policy's `lr_scale`
    comes on top of it), other callbacks, and what was logged. So a run of `max_steps` ends with
    that many updates less those taken back. States to go back to are in a temporary folder in
    ``trainer.default_root_dir``, and are those of this call of ``fit``. The policy's `after` and
    `ranks` mean nothing here.

    Checkpoints of the trainer contain the clippers, the monitors, and the number of rollbacks used.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value; when training starts, also
            where `monitor` does not go with the optimizers, or a rollback with the trainer.
        RuntimeError: when training starts, where the trainer clips as well or its strategy has
            gradients that cannot be clipped so; or when all rollbacks are used.
    """

    def __init__(
        self,
        max_norm: float | Tensor | Callable[[int], float] | None = None,
        *,
        rule: Rule | None = None,
        norm_type: float | str = 2.0,
        nonfinite: Policy = "skip",
        monitor: Monitor | Sequence[Monitor | None] | None = None,
        log_every: int | None = None,
        depth: int = 1,
        on_critical: Literal["stop", "ignore"] | RollbackPolicy = "stop",
        checkpoint_every: int = 100,
        val_loss: str = "val_loss",
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "max_norm": max_norm,
            "rule": rule,
            "norm_type": norm_type,
            "nonfinite": nonfinite,
        }
        GradClipper([], **self._options)  # raises here what would be raised when training starts
        for name, value, least in (
            *(("log_every", 0 if log_every is None else log_every, 0), ("depth", depth, 0)),
            ("checkpoint_every", checkpoint_every, 1),
        ):
            what = f"a whole number of at least {least}"
            require(name, value, what, partial(le, least), whole=True)
        if not (on_critical in ("stop", "ignore") or isinstance(on_critical, RollbackPolicy)):
            raise ValueError(
                f'on_critical must be "stop", "ignore" or a RollbackPolicy, got {on_critical!r}'
            )
        self.monitors = monitors_of(monitor)
        if isinstance(on_critical, RollbackPolicy) and not any(self.monitors):
            raise ValueError("a RollbackPolicy as on_critical needs a monitor that finds events")
        self._log_every, self._depth, self._val_loss = log_every, depth, val_loss
        self._on_critical, self._checkpoint_every = on_critical, checkpoint_every
        self._held: list[BeforeStep] = []
        self._rollbacks: Rollbacks | None = None
        self._used = 0  # rollbacks of earlier calls of fit
        self._undone = 0  # updates that the trainer's global_step counts and that were taken back
        self._saved: Mapping[str, Any] | None = None  # loaded, and not yet taken up
        self._backward = False  # whether there was one in this batch
        self._started = 0  # global_step when the batch began
        self._going_on = False  # whether an update has begun
        self._loss: Any = None  # of the update that is going on
        self._validated: Any = None  # the validation loss that no record has yet

    @property
    def clippers(self) -> list[GradClipper]:
        """One for each optimizer, in their order; none before training starts."""
        return [each.clipper for each in self._held]

    @property
    def rollbacks(self) -> int:
        """How often training went back, over all calls of ``fit``."""
        return self._used if self._rollbacks is None else self._rollbacks.used

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        require_suitable(trainer)
        require_monitors(trainer, self.monitors)
        if isinstance(self._on_critical, RollbackPolicy):
            require_going_back(trainer, pl_module)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._build(trainer, pl_module)
        saved, self._saved = self._saved, None
        if saved is not None:
            self._take_up(saved)
        elif trainer.global_step == 0:
            self._undone = 0
        self._loss = self._validated = None
        self._going_on = False
        if isinstance(self._on_critical, RollbackPolicy):
            self._rollbacks = self._recovering(trainer, pl_module, self._on_critical)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._backward = False
        self._started = trainer.global_step
        cut = 1.0
        if self._rollbacks is not None:
            if not self._going_on:
                self._undone = trainer.global_step - self._rollbacks.next_step()
            cut = self._rollbacks.recovery.lr_scale
        self._going_on = True
        for held in self._held:
            held.lr = held.optimizer.param_groups[0]["lr"] * cut

    def on_after_backward(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._backward = True

    def on_before_optimizer_step(
        self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer
    ) -> None:
        scaler = scaler_of(trainer)
        if scaler is not None and pl_module.automatic_optimization and not self._backward:
            return  # training_step returned None: Lightning does not call the scaler's step
        held = self._of(trainer, pl_module, optimizer)
        stats = held.clipper.clip_(optimizer, scaler)
        held.skip_if(stats, scaler)
        if stats.names:
            held.found[trainer.global_step - self._undone] = stats

    def on_train_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._loss is not None and pl_module.automatic_optimization and loss is not None:
            loss = self._loss + loss
        self._loss = self._loss if loss is None else loss
        if trainer.global_step == self._started:
            return  # an update takes more batches
        self._log(trainer)
        events = self._observed()
        self._loss = self._validated = None
        self._going_on = False
        for held in self._held:
            held.found.clear()
        self._act(trainer, events)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.callback_metrics.get(self._val_loss)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        for monitor in filter(None, self.monitors):
            events = monitor.flush()
            if self._rollbacks is not None:
                self._roll_back(trainer, self._rollbacks, events)
            elif self._on_critical == "stop":
                _tell_of(events, "after the last update")
        self._close()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Of clippers and monitors, by optimizer, and the rollbacks: plain data and tensors."""
        if self._saved is not None:
            return dict(self._saved)
        return {
            "clippers": [clipper.state_dict() for clipper in self.clippers],
            "monitors": [each and each.state_dict() for each in self.monitors],
            "rollbacks": self.rollbacks,
            "undone": self._undone,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, once training starts."""
        self._saved = state_dict

    def _build(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """A clipper for each optimizer there is now; those before hand on what they know."""
        states = [each.clipper.state_dict() for each in self._held]
        self._held = [
            BeforeStep(pl_module, inner_of(optimizer), self._options)
            for optimizer in trainer.optimizers
        ]
        for held, state in zip(self._held, states, strict=False):
            held.clipper.load_state_dict(state)

    def _of(
        self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer
    ) -> BeforeStep:
        for _ in range(2):
            for held in self._held:
                if held.optimizer is optimizer:
                    return held
            self._build(trainer, pl_module)  # somebody has replaced the optimizers
        raise RuntimeError(
            f"{type(optimizer).__name__} steps and is none of the trainer's optimizers, so "
            "GradClipCallback cannot clip for it"
        )

    def _take_up(self, saved: Mapping[str, Any]) -> None:
        for name, parts in (("clippers", self.clippers), ("monitors", self.monitors)):
            states = saved[name]
            if len(states) != len(parts):
                raise ValueError(
                    f"the checkpoint has the state of {len(states)} {name}, and this "
                    f"GradClipCallback has {len(parts)}"
                )
            for part, state in zip(parts, states, strict=True):
                if part is not None and state is not None:
                    part.load_state_dict(state)
        self._used, self._undone = saved["rollbacks"], saved["undone"]

    def _recovering(
        self, trainer: "Trainer", pl_module: "LightningModule", policy: RollbackPolicy
    ) -> Rollbacks:
        held, scaler = self._held[0], scaler_of(trainer)
        root = Path(trainer.default_root_dir)
        root.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(prefix="fastclip-recovery-", dir=root)
        parts = {"module": pl_module, "clipper": held.clipper, "monitor": self.monitors[0]}
        return Rollbacks(
            Path(self._folder.name),
            held.optimizer,
            parts if scaler is None else parts | {"scaler": scaler},
            policy,
            first=trainer.global_step - self._undone,
            used=self._used,
            every=self._checkpoint_every,
            keep=KEPT,
        )

    def _roll_back(self, trainer: "Trainer", rollbacks: Rollbacks, events: Iterable[Event]) -> None:
        step = rollbacks.back(events)
        if step is not None:
            self._undone = trainer.global_step - step

    def _close(self) -> None:
        if self._rollbacks is not None:
            self._used = self.rollbacks
            self._rollbacks.close()
            self._rollbacks = None
            self._folder.cleanup()

    def _log(self, trainer: "Trainer") -> None:
        every = self._log_every
        if every is None:
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        # the step that the module's own metrics of this batch are logged with
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if every == 0 or (step + 1) % every or not trainer.loggers:
            return
        rows: dict[str, float] = {}
        for n, held in enumerate(self._held):
            if held.found:
                prefix = f"optimizer_{n}/" if len(self._held) > 1 else ""
                rows.update((prefix + name, value) for name, value in held.row(self._depth).items())
        for logger in trainer.loggers if rows else ():
            logger.log_metrics(rows, step=step)

    def _observed(self) -> list[Event]:
        """What the monitors say of the updates of a batch."""
        events: list[Event] = []
        for held, monitor in zip(self._held, self.monitors, strict=bool(self.monitors)):
            if monitor is not None:
                for step, stats in held.found.items():
                    fields = {"loss": self._loss, "val_loss": self._validated, "lr": held.lr}
                    events += monitor.observe(step=step, stats=stats, **fields)
        return events

    def _act(self, trainer: "Trainer", events: Sequence[Event]) -> None:
        if self._rollbacks is not None:
            self._roll_back(trainer, self._rollbacks, events)
        elif self._on_critical == "stop" and self.monitors:
            stop = _tell_of(events, "stopping the training")
            if trainer.world_size > 1:  # each rank has a loss of its own
                stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
            trainer.should_stop = trainer.should_stop or stop


def _tell_of(events: Iterable[Event], what: str) -> bool:
    """Tell the logger "fastclip" of critical events; whether there are any."""
    critical = [event for event in events if event.level == "critical"]
    for event in critical:
        logging.getLogger("fastclip").warning("%s: %s", what, sentence(event))
    return bool(critical)
