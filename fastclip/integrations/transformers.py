"""fastclip in a ``transformers.Trainer``: a callback that clips, logs, watches and goes back."""

import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import accelerated
from fastclip.clipper import GradClipper
from fastclip.integrations.entries import Entries
from fastclip.integrations.entries import block_of as block_of
from fastclip.integrations.losses import Losses
from fastclip.integrations.rollbacks import Rollbacks
from fastclip.monitor import Event, Monitor, RollbackPolicy
from fastclip.policy import Policy
from fastclip.rules import Rule
from fastclip.stats import GradStats
from fastclip.step import settings_of

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "fastclip.integrations.transformers needs transformers: pip install transformers"
    ) from error

__all__ = ["GradClipCallback", "block_of"]

VERSION = 1
NAME = "fastclip.pt"  # in the Trainer's checkpoints
FOLDER = "fastclip-recovery"  # of the checkpoints that rollbacks go back to

OnCritical = Literal["ignore", "stop"] | RollbackPolicy


class GradClipCallback(TrainerCallback):
    """Clips the gradients of a ``Trainer``, and adds what it measured to the Trainer's log.

    >>> callback = GradClipCallback(max_norm=1.0, monitor=Monitor(sinks=[JSONL("run.jsonl")]))
    >>> args = TrainingArguments("out", max_grad_norm=0)  # or the Trainer would clip as well
    >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    Every entry of the log with a loss gets `grad_clip_coef` and `grad_nonfinite` (the number of
    elements) of its step, `grad_clipped` (a share) and `grad_skipped` (a number) of the steps since
    the entry before, and for each block of the model ``grad_norm/BLOCK`` and ``grad_max/BLOCK``, of
    the gradient before clipping and without a loss scale. The Trainer's own `grad_norm` is the norm
    before clipping, too.

    A step that is skipped leaves the parameters and the optimizer's state as they were; the
    learning rate's schedule goes on. Under fp16 the Trainer's scaler skips, and lowers its scale.

    In every checkpoint of the Trainer ``fastclip.pt`` has the state of the clipper and the monitor;
    a run that is resumed takes it up.

    The records of the `monitor` have as `step` the number of updates in the model and as `batch`
    the Trainer's ``global_step``; the two differ after a rollback. `loss` is the mean over the
    batch, the accumulation and all ranks of the loss that the model returns. Where it returns none
    (label smoothing, ``compute_loss_func``, several GPUs in one process) it is that of the log, in
    the steps that are logged. `val_loss` is `eval_loss`.

    `clipper` is the `GradClipper` of the training, and `stats` are those of the newest step.

    Args:
        max_norm: as of `GradClipper`, and so are the next three.
        rule: instead of a fixed threshold.
        norm_type: the order of the norm.
        nonfinite: what to do about NaN and infinities.
        monitor: what every step is observed by.
        on_critical: what to do about a critical event of the monitor:

            - ``"ignore"``: nothing;
            - ``"stop"``: end the training, without saving the state of that step;
            - a `RollbackPolicy`: go back, when its `on` says so, to the newest state that is known
              to be good, with the learning rate lowered for a while, and go on with the batches
              that follow. ``global_step``, the schedule and the data are not wound back. Its
              `after` and `ranks` mean nothing here.
        every: steps between two states that a rollback can go back to.
        keep: how many of them that are confirmed are kept, in the Trainer's ``output_dir``.
        layers: as `GradStats.grouped`: the number of parts of a parameter's name, or a function of
            the name, that says under which BLOCK it is logged. None: no entries by block.
        resume_from: the folder of the checkpoint with ``fastclip.pt``, for a run that resumes from
            one that is not in its own ``output_dir``.

    Raises:
        TypeError, ValueError: settings that `GradClipper` refuses; or `on_critical` is unknown, or
            not ``"ignore"`` without a monitor. When training begins, where ``max_grad_norm`` would
            clip as well, or the gradients are DeepSpeed's or FSDP1's.
        FileNotFoundError: when training begins, where `resume_from` has no ``fastclip.pt``.
    """

    def __init__(
        self,
        max_norm: float | Tensor | Callable[[int], float] | None = None,
        *,
        rule: Rule | None = None,
        norm_type: float | str = 2.0,
        nonfinite: Policy = "skip",
        monitor: Monitor | None = None,
        on_critical: OnCritical = "ignore",
        every: int = 100,
        keep: int = 3,
        layers: int | Callable[[str], str] | None = block_of,
        resume_from: str | Path | None = None,
    ) -> None:
        settings_of(max_norm, rule, norm_type, nonfinite)
        _require_known(on_critical, monitor)
        self._options: dict[str, Any] = {"max_norm": max_norm, "rule": rule}
        self._options |= {"norm_type": norm_type, "nonfinite": nonfinite}
        self.monitor = monitor
        self._on_critical = on_critical
        self._every, self._keep = every, keep
        self._resume_from = resume_from
        self.clipper: GradClipper | None = None
        self.stats: GradStats | None = None
        self._losses = Losses()
        self._rollbacks: Rollbacks | None = None
        self._next = 0  # the number of updates in the model
        self._row: dict[str, Any] | None = None  # of the monitor, for the step that is going on
        self._awaited = ""  # what the row still lacks: "loss" or "evaluation"
        self._entries = Entries(layers)
        self._used = 0  # rollbacks of the processes that this run goes on from

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Begin afresh, or go on from the checkpoint that the Trainer has loaded.

        Raises:
            ValueError: ``max_grad_norm`` would clip as well, or the gradients are FSDP1's.
            TypeError: the gradients are DeepSpeed's.
            FileNotFoundError: there is no ``fastclip.pt`` in `resume_from`.
        """
        _require_clippable(args, model)
        inner, scaler = _unwrapped(optimizer)
        self._end()
        self.clipper = GradClipper(model, **self._options)
        self.stats, self._row, self._next, self._used = None, None, state.global_step, 0
        if state.global_step:
            self._resume(_output(args) / f"checkpoint-{state.global_step}")
        self._entries.begin(self.clipper)
        if args.n_gpu <= 1:
            self._losses.attach(model)
        if isinstance(self._on_critical, RollbackPolicy):
            parts = {"model": model, "clipper": self.clipper, "monitor": self.monitor}
            self._rollbacks = Rollbacks(
                _output(args) / FOLDER,
                inner,
                parts if scaler is None else parts | {"scaler": scaler},
                self._on_critical,
                first=self._next,
                used=self._used,
                every=self._every,
                keep=self._keep,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(state, control)
        if self._rollbacks is not None:
            self._next = self._rollbacks.next_step()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Clip; or, for a step that is to be skipped, take the gradients away."""
        assert self.clipper is not None
        inner, scaler = _unwrapped(optimizer)
        self.stats = stats = self.clipper.clip_(inner, scaler)
        skips = self._options["nonfinite"] == "skip" or stats.contributions is not None
        if scaler is None and skips and stats.skipped:
            inner.zero_grad(set_to_none=True)
        loss = self._losses.take(args.world_size, args.average_tokens_across_devices)
        if self.monitor is None:
            return
        scale = 1.0 if self._rollbacks is None else self._rollbacks.recovery.lr_scale
        lr = inner.param_groups[0]["lr"] * scale
        self._row = {"step": self._next, "stats": stats, "loss": loss, "lr": lr}
        self._row["batch"] = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Observe the step, before the Trainer saves it; later, if more of it is yet to come."""
        self._next += 1
        last = args.eval_strategy == "epoch" and state.epoch == int(state.epoch)
        self._awaited = "evaluation" if control.should_evaluate or last else ""
        if self._row is not None and self._row["loss"] is None and control.should_log:
            self._awaited = self._awaited or "loss"
        if not self._awaited:
            self._settle(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the statistics; callbacks that come after this one are given them, too."""
        if logs is None or "loss" not in logs or self.stats is None or self.clipper is None:
            return
        found = self._entries.made(self.clipper, self.stats)
        logs.update(found)
        state.log_history[-1].update(found)
        if self._row is not None and self._row["loss"] is None:
            self._row["loss"] = logs["loss"]
        if self._awaited == "loss":
            self._settle(state, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._row is not None:
            self._row["val_loss"] = (metrics or {}).get("eval_loss")
            self._settle(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not control.should_evaluate:
            self._settle(state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write ``fastclip.pt``; not in a search for hyperparameters, from which none resumes."""
        if self.clipper is None or not args.should_save or state.is_hyper_param_search:
            return
        path = _output(args) / f"checkpoint-{state.global_step}" / NAME
        content = {
            "version": VERSION,
            "step": self._next,
            "rollbacks": self._used if self._rollbacks is None else self._rollbacks.used,
            "clipper": self.clipper.state_dict(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(content, unfinished)
        unfinished.replace(path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(state, control)
        self._end()
        if isinstance(self._on_critical, RollbackPolicy) and state.is_world_process_zero:
            shutil.rmtree(_output(args) / FOLDER)

    def _resume(self, folder: Path) -> None:
        assert self.clipper is not None
        path = Path(self._resume_from or folder) / NAME
        if not path.exists():
            if self._resume_from is not None:
                raise FileNotFoundError(f"{self._resume_from} has no {NAME} to resume from")
            warnings.warn(
                f"{path} is missing, so the clipper and the monitor start afresh. For a checkpoint "
                "in another folder say GradClipCallback(resume_from=...)",
                stacklevel=2,
            )
            return
        saved = torch.load(path, weights_only=True, map_location="cpu")
        if saved["version"] != VERSION:
            known = f"where {VERSION} is known"
            raise ValueError(f"{path} has version {saved['version']!r}, {known}")
        self.clipper.load_state_dict(saved["clipper"])
        if self.monitor is not None and saved["monitor"] is not None:
            self.monitor.load_state_dict(saved["monitor"])
        self._next, self._used = saved["step"], saved["rollbacks"]

    def _settle(self, state: TrainerState, control: TrainerControl) -> None:
        """Observe the row, if there is one. Where the Trainer is about to save, wait for what is
        still on its way from a device: nothing is saved that has not been judged."""
        if self.monitor is None:
            return
        row, self._row, self._awaited = self._row, None, ""
        events = [] if row is None else self.monitor.observe(**row)
        if control.should_save or control.should_training_stop:
            events += self.monitor.flush()
        if self._rollbacks is not None:
            self._roll_back(self._rollbacks, events, state)
        elif self._on_critical == "stop":
            _stop(events, state, control)

    def _roll_back(self, rollbacks: Rollbacks, events: list[Event], state: TrainerState) -> None:
        step = rollbacks.back(events)
        if step is None:
            return
        assert self.clipper is not None
        self._entries.begin(self.clipper)
        _enter(state, {"rolled_back": rollbacks.used, "updates_lost": self._next - step})
        self._next = step

    def _end(self) -> None:
        """What a training has set up; that of one which raised, when the next begins."""
        self._losses.detach()
        if self._rollbacks is not None:
            self._rollbacks.close()
            self._rollbacks = None


def _stop(events: Iterable[Event], state: TrainerState, control: TrainerControl) -> None:
    critical = [event for event in events if event.level == "critical"]
    if not critical:
        return
    event = critical[0]
    why = f"{event.kind} at step {event.step}: {event.message}"
    logging.getLogger("fastclip").warning("stopping the training, because of %s", why)
    control.should_training_stop, control.should_save = True, False
    _enter(state, {"stopped_by": why})


def _enter(state: TrainerState, entry: dict[str, Any]) -> None:
    """Into the Trainer's log, but not to its reporters: those take numbers."""
    state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})


def _output(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output")  # the latter is the Trainer's default


def _unwrapped(optimizer: Any) -> tuple[Optimizer, GradScaler | None]:
    """The optimizer inside of accelerate's, and the scaler that steps it, if one is in use."""
    inner, scaler = accelerated.unwrapped(optimizer, None)
    (inner,) = inner if isinstance(inner, list) else [inner]
    return inner, scaler if scaler is not None and scaler.is_enabled() else None


def _require_known(on_critical: object, monitor: object) -> None:
    if not (on_critical in ("ignore", "stop") or isinstance(on_critical, RollbackPolicy)):
        raise ValueError(
            f"on_critical must be 'ignore', 'stop' or a RollbackPolicy, got {on_critical!r:.80}"
        )
    if monitor is None and on_critical != "ignore":
        raise ValueError("on_critical is about the events of a monitor, and there is none")


def _require_clippable(args: TrainingArguments, model: Any) -> None:
    if 0 < args.max_grad_norm < math.inf:
        raise ValueError(
            f"the Trainer clips to max_grad_norm={args.max_grad_norm} before GradClipCallback sees "
            "the gradients: pass TrainingArguments(max_grad_norm=0)"
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise ValueError(
            "of FSDP1 every rank holds parts of the gradients that have no names and no common "
            "norm here: pass TrainingArguments(fsdp_config={'fsdp_version': 2}) or 'version': 2"
        )
