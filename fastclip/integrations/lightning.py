"""Lightning: a callback that clips, logs, watches, and stops or goes back.

Works with ``lightning.pytorch`` and with ``pytorch_lightning``: it is a callback of the one that is
imported already, else of the one that is installed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from fastclip.checks import require
from fastclip.clipper import GradClipper
from fastclip.integrations._clipping import BeforeStep, options_of
from fastclip.integrations._critical import Alarms, OnCritical, require_answers
from fastclip.integrations._entries import Entries, Layers, require_layers
from fastclip.integrations._entries import block_of as block_of
from fastclip.integrations._rollbacks import Past, Rollbacks
from fastclip.integrations._trainers import (
    inner_of,
    log_step_of,
    monitors_of,
    require_going_back,
    require_monitors,
    require_suitable,
    scaler_of,
)
from fastclip.monitor import Event, Monitor, RollbackPolicy
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

__all__ = ["GradClipCallback", "block_of"]


class GradClipCallback(Callback):
    """Clips before every step of an optimizer, in automatic and in manual optimisation.

    >>> trainer = Trainer(callbacks=[GradClipCallback(max_norm=1.0)])

    Each optimizer has a `GradClipper` of its own, for the parameters that it has, under their names
    in the module; parameters that are added later are clipped as well. Gradients are rescaled in
    place before the optimizer sees them. Under ``precision="16-mixed"`` they are clipped unscaled:
    where a fused optimizer is to take the loss scale out itself, which Lightning's own clipping
    refuses, the callback takes it out in the same write.

    The trainer's loggers are given `grad_norm` (before clipping, without a loss scale),
    `grad_clip_coef`, `grad_nonfinite` (the number of elements) and, under a scaler, `loss_scale` of
    an update, `grad_clipped` (a share) and `grad_skipped` (a number) of the updates since the row
    before, and for each block of the module ``grad_norm/BLOCK`` and ``grad_max/BLOCK``. With
    several optimizers the names begin with ``optimizer_0/``, ``optimizer_1/`` and so on.

    A step with NaN or infinite gradients is not taken (`nonfinite`): a fused optimizer and a
    GradScaler are handed the flag, and for others it is read, once per step, and the gradients are
    set to None. `trainer.global_step` counts such a step all the same.

    Args:
        max_norm: the threshold of each optimizer, as of `GradClipper`, and so are the next three.
        rule: instead of a fixed threshold.
        norm_type: the order of the norm.
        nonfinite: what to do about NaN and infinities.
        monitor: a `Monitor` that is told of every update; with several optimizers, one for each in
            their order, None for one that is not watched. `step` is the trainer's `global_step`
            without the updates that were taken back, `loss` what ``training_step`` returned (in
            automatic optimisation summed over accumulated batches, which Lightning has divided by
            their number), `lr` that of the first parameter group.
        on_critical: what to do about a critical event of the monitor. Each answer is told to the
            logger "fastclip".

            - ``"warn"``: go on, with one warning for each incident;
            - ``"stop"``: end the training, as early stopping does;
            - a `RollbackPolicy`: go back in place, when its `on` says so. It needs one process, one
              optimizer and automatic optimisation. Its `after` and `ranks` mean nothing here.
        checkpoint_every: updates between two states that a rollback can go back to.
        keep: how many of them that are confirmed are kept, in a temporary folder in
            ``trainer.default_root_dir``.
        layers: as `GradStats.grouped`: the number of parts of a parameter's name, or a function of
            the name, that says under which BLOCK it is logged. None: no entries by block.
        log_every: updates (in manual optimisation batches) between two rows in the trainer's
            loggers; None means as often as ``Trainer(log_every_n_steps=...)`` says, 0 never.
        val_loss: under which name the module logs its validation loss, for the next record.

    What a rollback restores, before the next batch, validation or checkpoint: the module, the
    optimizer's state, the GradScaler, random number generators, clipper and monitor. Not taken back
    are the batches (Lightning goes on with the following ones, so the suspect ones are passed
    over), `trainer.global_step`, the epoch, the learning rate's schedule (the policy's `lr_scale`
    comes on top of it), other callbacks, and what was logged. So a run of `max_steps` ends with
    that many updates less those taken back. States to go back to are those of this call of ``fit``.

    Checkpoints of the trainer contain the clippers, the monitors, and the rollbacks so far.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value; when training starts, also
            where `monitor` does not go with the optimizers, or a rollback with the trainer.
        RuntimeError: when training starts, where the trainer, the module or another such callback
            clips as well, there is no optimizer, or the strategy's gradients cannot be clipped so;
            or when all rollbacks are used, or the optimizer that one would restore was replaced.
    """

    def __init__(
        self,
        max_norm: float | Tensor | Callable[[int], float] | None = None,
        *,
        rule: Rule | None = None,
        norm_type: float | str = 2.0,
        nonfinite: Policy = "skip",
        monitor: Monitor | Sequence[Monitor | None] | None = None,
        on_critical: OnCritical = "warn",
        checkpoint_every: int = 100,
        keep: int = 3,
        layers: Layers = block_of,
        log_every: int | None = None,
        val_loss: str = "val_loss",
    ) -> None:
        super().__init__()
        self._options = options_of(max_norm, rule, norm_type, nonfinite)
        self.monitors = monitors_of(monitor)
        require_answers(on_critical, checkpoint_every, keep, any(self.monitors))
        require_layers(layers)
        least = "a whole number of at least 0, or None"
        every = 0 if log_every is None else log_every
        require("log_every", every, least, lambda count: count >= 0, whole=True)
        self._on_critical, self._checkpoint_every, self._keep = on_critical, checkpoint_every, keep
        self._layers, self._log_every, self._val_loss = layers, log_every, val_loss
        self._alarms = [Alarms() for _ in self.monitors]
        self._held: list[BeforeStep] = []
        self._rollbacks: Rollbacks | None = None
        self._earlier: list[Past] = []  # rollbacks of earlier calls of fit
        self._undone = 0  # updates that the trainer's global_step counts and that were taken back
        self._saved: Mapping[str, Any] | None = None  # loaded, and not yet taken up
        self._backward = False  # whether there was one in this batch
        self._started = 0  # global_step when the batch began
        self._training = False
        self._going_on = False  # whether an update has begun
        self._loss: Any = None  # of the update that is going on
        self._validated: Any = None  # the validation loss that no record has yet

    @property
    def clippers(self) -> list[GradClipper]:
        """One for each optimizer, in order; none before training starts."""
        return [each.clipper for each in self._held]

    @property
    def rollbacks(self) -> int:
        """How often training went back, in all calls of ``fit`` since it began at step 0."""
        return len(self._past)

    @property
    def _past(self) -> list[Past]:
        return self._earlier if self._rollbacks is None else self._rollbacks.past

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        require_suitable(trainer, pl_module, GradClipCallback)
        require_monitors(trainer, self.monitors)
        if isinstance(self._on_critical, RollbackPolicy):
            require_going_back(trainer, pl_module)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._build(trainer, pl_module)
        saved, self._saved = self._saved, None
        if saved is not None:
            self._take_up(saved)
        if trainer.global_step == 0:
            self._undone, self._earlier = 0, []
        self._training, self._going_on = True, False
        self._loss = self._validated = None
        if isinstance(self._on_critical, RollbackPolicy):
            self._rollbacks = self._recovering(trainer, pl_module, self._on_critical)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._backward = False
        self._started = trainer.global_step
        if self._rollbacks is not None and not self._going_on:
            self._go_back(trainer, self._rollbacks.next_step())
        self._going_on = True

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
        # without a scaler this is called within the step, where the rate is cut already
        later = self._rollbacks if scaler is not None else None
        cut = 1.0 if later is None else later.recovery.lr_scale
        held.note(trainer.global_step - self._undone, stats, cut)

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
        critical = self._observed(trainer)
        self._loss = self._validated = None
        self._going_on = False
        for held in self._held:
            held.found.clear()
        if self._on_critical == "stop" and self.monitors:
            if trainer.world_size > 1:  # each rank has a loss of its own
                critical = trainer.strategy.reduce_boolean_decision(critical, all=False)
            trainer.should_stop = trainer.should_stop or critical

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.callback_metrics.get(self._val_loss)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        for monitor, alarms in zip(self.monitors, self._alarms, strict=True):
            if monitor is not None:
                self._answer(trainer, monitor, alarms, monitor.flush())
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
            "counted": [each.entries.counted for each in self._held],
            "rollbacks": self._past,
            "undone": self._undone,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, once training starts; at once if it has."""
        if self._training:  # by what looks for a learning rate between two epochs
            self._take_up(state_dict)
        else:
            self._saved = state_dict

    def _build(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """A clipper for each optimizer there is now; those before hand on what they know."""
        before = self._held
        self._held = [
            BeforeStep(pl_module, inner_of(optimizer), self._options, Entries(self._layers))
            for optimizer in trainer.optimizers
        ]
        for held, old in zip(self._held, before, strict=False):
            held.clipper.load_state_dict(old.clipper.state_dict())
            held.entries = old.entries
        for held in self._held:
            held.logged = log_step_of(trainer)

    def _of(
        self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer
    ) -> BeforeStep:
        for _ in range(2):
            for held in self._held:
                if held.optimizer is optimizer:
                    return held
            if self._rollbacks is not None:
                raise RuntimeError(
                    "the trainer's optimizers were replaced, and the states that a rollback could "
                    "go back to are of those before"
                )
            require_monitors(trainer, self.monitors)
            self._build(trainer, pl_module)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps and is none of the trainer's optimizers, so "
            "GradClipCallback cannot clip for it"
        )

    def _take_up(self, saved: Mapping[str, Any]) -> None:
        if not saved["clippers"]:
            return  # of before any training, as those that a tuner writes
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
        for held, counted in zip(self._held, saved["counted"], strict=True):
            held.entries.counted = dict(counted)
        self._earlier, self._undone = saved["rollbacks"], saved["undone"]

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
            earlier=self._earlier,
            every=self._checkpoint_every,
            keep=self._keep,
        )

    def _go_back(self, trainer: "Trainer", step: int | None) -> None:
        """Note that so many updates are left, if that is fewer than there were."""
        if step is not None and trainer.global_step - step != self._undone:
            self._undone = trainer.global_step - step
            self._held[0].entries.begin(self._held[0].clipper)

    def _close(self) -> None:
        self._training = False
        for held in self._held:
            held.withdraw()
        if self._rollbacks is not None:
            self._earlier = self._rollbacks.past
            self._rollbacks.close()
            self._rollbacks = None
            self._folder.cleanup()

    def _log(self, trainer: "Trainer") -> None:
        every = self._log_every
        if every is None:
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if every == 0 or not trainer.loggers:
            return
        rows: dict[str, float] = {}
        step = log_step_of(trainer)
        for n, held in enumerate(self._held):
            if held.found and (step + 1) // every > held.logged // every:
                held.logged = step + 1
                prefix = f"optimizer_{n}/" if len(self._held) > 1 else ""
                rows.update((prefix + name, value) for name, value in held.row().items())
        for logger in trainer.loggers if rows else ():
            logger.log_metrics(rows, step=step)

    def _observed(self, trainer: "Trainer") -> bool:
        """Tell the monitors of the updates of a batch; whether one of them calls it critical."""
        critical = False
        several = zip(self._held, self.monitors, self._alarms, strict=bool(self.monitors))
        for held, monitor, alarms in several:
            if monitor is None:
                continue
            events: list[Event] = []
            for step, stats in held.found.items():
                fields = {"loss": self._loss, "val_loss": self._validated, "lr": held.lr}
                events += monitor.observe(step=step, stats=stats, **fields)
            critical |= self._answer(trainer, monitor, alarms, events)
        return critical

    def _answer(
        self, trainer: "Trainer", monitor: Monitor, alarms: Alarms, events: list[Event]
    ) -> bool:
        """Go back, or tell of what is critical; whether something is."""
        if self._rollbacks is not None:
            self._go_back(trainer, self._rollbacks.back(events))
            return False
        then = "stopping the training: " if self._on_critical == "stop" else ""
        return bool(alarms.tell(events, monitor.attempt, then))
