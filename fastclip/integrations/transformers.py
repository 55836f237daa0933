"""fastclip in a ``transformers.Trainer``: a callback that clips, logs, watches and goes back."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastclip.clipper import GradClipper
from fastclip.integrations._clipping import lr_of, options_of
from fastclip.integrations._critical import Alarms, OnCritical, require_answers
from fastclip.integrations._entries import Entries, Layers, require_layers
from fastclip.integrations._entries import block_of as block_of
from fastclip.integrations._losses import Losses
from fastclip.integrations._measuring import Measuring
from fastclip.integrations._rollbacks import Past, Rollbacks
from fastclip.integrations._trainers import TWICE, on_any, require_clippable, unwrapped
from fastclip.monitor import Monitor, RollbackPolicy
from fastclip.policy import Policy
from fastclip.rules import Rule
from fastclip.stats import GradStats

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


class GradClipCallback(TrainerCallback):
    """Clips the gradients of a ``Trainer``, and adds what it measured to the Trainer's log.

    >>> callback = GradClipCallback(max_norm=1.0, monitor=Monitor(sinks=[JSONL("run.jsonl")]))
    >>> args = TrainingArguments("out", max_grad_norm=0)  # or the Trainer would clip as well
    >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    The Trainer measures the norm by itself before the callback has the gradients, where torch's
    function would write them. So `fastclip.integrations.torch.patch` is in force from the beginning
    of each step until then. A step that raises leaves it so until the callback goes away, or begins
    another training: torch's functions mean the same meanwhile.

    Every entry of the log with a loss gets `grad_norm` (before clipping, without a loss scale),
    `grad_clip_coef`, `grad_nonfinite` (the number of elements) and, under a scaler, `loss_scale` of
    its step, `grad_clipped` (a share) and `grad_skipped` (a number) of the steps since the entry
    before, and for each block of the model ``grad_norm/BLOCK`` and ``grad_max/BLOCK``.

    A step that is skipped leaves the parameters and the optimizer's state as they were; the
    learning rate's schedule goes on. Under fp16 the Trainer's scaler skips, and lowers its scale.

    In every checkpoint of the Trainer ``fastclip.pt`` has the state of the clipper and the monitor;
    a run that is resumed takes it up.

    The records of the `monitor` have as `step` the number of updates in the model and as `batch`
    the Trainer's ``global_step``; the two differ after a rollback. `loss` is the mean over the
    batch, the accumulation and all ranks of the loss that the model returns, which is not the
    Trainer's where its ``compute_loss`` makes another, as TRL's do. Where it returns none (label
    smoothing, ``compute_loss_func``, several GPUs in one process) it is that of the log, in the
    steps that are logged. `val_loss` is `eval_loss`.

    `clipper` is the `GradClipper` of the training, `stats` are those of the newest step, and
    `rollbacks` is how often it went back.

    Args:
        max_norm: as of `GradClipper`, and so are the next three.
        rule: instead of a fixed threshold.
        norm_type: the order of the norm.
        nonfinite: what to do about NaN and infinities.
        monitor: what every step is observed by.
        on_critical: what to do about a critical event of the monitor. Each answer is told to the
            logger "fastclip".

            - ``"warn"``: go on, with one warning for each incident;
            - ``"stop"``: end the training, without saving the state of that step;
            - a `RollbackPolicy`: go back, when its `on` says so, to the newest state that is known
              to be good, with the learning rate lowered for a while, and go on with the batches
              that follow. ``global_step``, the schedule and the data are not wound back. Its
              `after` and `ranks` mean nothing here.
        checkpoint_every: updates between two states that a rollback can go back to.
        keep: how many of them that are confirmed are kept, in the Trainer's ``output_dir``.
        layers: as `GradStats.grouped`: the number of parts of a parameter's name, or a function of
            the name, that says under which BLOCK it is logged. None: no entries by block.
        resume_from: the folder of the checkpoint with ``fastclip.pt``, for a run that resumes from
            one that is not in its own ``output_dir``.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value, or `on_critical` asks for
            more than a warning and there is no monitor. When training begins, where
            ``max_grad_norm`` or another such callback would clip as well, or the gradients are
            DeepSpeed's or FSDP1's.
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
        on_critical: OnCritical = "warn",
        checkpoint_every: int = 100,
        keep: int = 3,
        layers: Layers = block_of,
        resume_from: str | Path | None = None,
    ) -> None:
        self._options = options_of(max_norm, rule, norm_type, nonfinite)
        if not isinstance(monitor, Monitor | None):
            raise TypeError(f"monitor must be a Monitor, got {monitor!r:.80}")
        require_answers(on_critical, checkpoint_every, keep, monitor is not None)
        require_layers(layers)
        self.monitor = monitor
        self._on_critical, self._checkpoint_every, self._keep = on_critical, checkpoint_every, keep
        self._alarms = Alarms()
        self._resume_from = resume_from
        self.clipper: GradClipper | None = None
        self.stats: GradStats | None = None
        self._losses = Losses()
        self._rollbacks: Rollbacks | None = None
        self._next = 0  # the number of updates in the model
        self._row: dict[str, Any] | None = None  # of the monitor, for the step that is going on
        self._awaited = ""  # what the row still lacks: "loss" or "evaluation"
        self._entries = Entries(layers)
        self._earlier: list[Past] = []  # rollbacks of the processes that this run goes on from
        self._measuring = Measuring()

    @property
    def rollbacks(self) -> int:
        """How often this training went back, and those that it goes on from."""
        return len(self._past)

    @property
    def _past(self) -> list[Past]:
        return self._earlier if self._rollbacks is None else self._rollbacks.past

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
            ValueError: ``max_grad_norm`` or another such callback would clip as well, or the
                gradients are FSDP1's.
            TypeError: the gradients are DeepSpeed's.
            FileNotFoundError: there is no ``fastclip.pt`` in `resume_from`.
        """
        require_clippable(args, model)
        other = vars(state).setdefault("_fastclip", self)  # a state is of one training
        if other is not self:
            other._end()
            raise ValueError(TWICE)
        inner, scaler = unwrapped(optimizer)
        self._end()
        self.clipper = GradClipper(model, **self._options)
        self.stats, self._row, self._next, self._earlier = None, None, state.global_step, []
        self._entries.begin(self.clipper)
        if state.global_step:
            self._resume(_output(args) / f"checkpoint-{state.global_step}")
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
                earlier=self._earlier,
                every=self._checkpoint_every,
                keep=self._keep,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, control)
        if self._rollbacks is not None:
            self._go_back(self._rollbacks.next_step(), state)
        self._measuring.begin()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Clip; or, for a step that is to be skipped, take the gradients away.

        Raises:
            RuntimeError: there is no gradient, because the optimizer has stepped already.
        """
        assert self.clipper is not None
        self._measuring.end()
        inner, scaler = unwrapped(optimizer)
        self.stats = stats = self.clipper.clip_(inner, scaler)
        skips = self._options["nonfinite"] == "skip" or stats.contributions is not None
        if scaler is None and skips and stats.skipped:
            inner.zero_grad(set_to_none=True)
        if not stats.names:
            raise RuntimeError(
                f"no parameter has a gradient when {type(inner).__name__} is to step, so there is "
                "nothing to clip: an optimizer that steps within the backward pass (LOMO, "
                "optim='..._layerwise') cannot be clipped by GradClipCallback"
            )
        loss = self._losses.take(args.world_size, args.average_tokens_across_devices)
        if self.monitor is None:
            return
        scale = 1.0 if self._rollbacks is None else self._rollbacks.recovery.lr_scale
        self._row = {"step": self._next, "stats": stats, "loss": loss, "lr": lr_of(inner, scale)}
        self._row["batch"] = state.global_step

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._losses.end_batch()

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
            self._settle(args, state, control)

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
            self._settle(args, state, control)

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
            best = args.save_strategy == "best"  # which is decided on after this
            self._settle(args, state, control, saves=best)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not control.should_evaluate:
            self._settle(args, state, control)

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
            "rollbacks": self._past,
            "counted": self._entries.counted,
            "clipper": self.clipper.state_dict(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(content, unfinished)
        unfinished.replace(path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, control)
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
        self._next, self._earlier = saved["step"], saved["rollbacks"]
        self._entries.counted = saved["counted"]

    def _settle(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        saves: bool = False,
    ) -> None:
        """Observe the row, if there is one. Where the Trainer is about to save, wait for what is
        still on its way from a device: nothing is saved that has not been judged."""
        saves = saves or control.should_save or control.should_training_stop
        if self.monitor is None or (self._row is None and not saves):
            return
        row, self._row, self._awaited = self._row, None, ""
        events = [] if row is None else self.monitor.observe(**row)
        if saves:
            events += self.monitor.flush()
        if self._rollbacks is not None:
            self._go_back(self._rollbacks.back(events), state)
            return
        stops = self._on_critical == "stop"
        then = "stopping the training: " if stops else ""
        critical = self._alarms.tell(events, self.monitor.attempt, then)
        if stops and on_any(bool(critical), args):
            control.should_training_stop, control.should_save = True, False
            why = critical[0] if critical else "a critical event on another rank"
            _enter(state, {"stopped_by": why})

    def _go_back(self, step: int | None, state: TrainerState) -> None:
        """Note that so many updates are left, if that is fewer than there were."""
        if step is None or step == self._next:
            return
        assert self.clipper is not None
        self._entries.begin(self.clipper)
        _enter(state, {"rolled_back": self.rollbacks, "updates_lost": self._next - step})
        self._next = step

    def _end(self) -> None:
        """What a training has set up; that of one which raised, when the next begins."""
        self._losses.detach()
        self._measuring.end()
        if self._rollbacks is not None:
            self._earlier = self._rollbacks.past
            self._rollbacks.close()
            self._rollbacks = None


def _enter(state: TrainerState, entry: dict[str, Any]) -> None:
    """Into the Trainer's log, but not to its reporters: those take numbers."""
    state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})


def _output(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output")  # the latter is the Trainer's default
