"""What the callbacks take from a Trainer, of Lightning and of transformers; what they refuse."""

import math
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import accelerated
from fastclip.monitor import Monitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from transformers import TrainingArguments

# Their gradients are pieces of flat buffers, or are kept where no parameter shows them.
UNSUITABLE = {
    "FSDPStrategy": "FSDP 1 keeps gradients in flat pieces whose norm no rank knows: use "
    "ModelParallelStrategy, whose gradients are DTensors",
    "DeepSpeedStrategy": 'DeepSpeed clips by itself: set "gradient_clipping" in its config',
    "XLAStrategy": "XLA gradients are not supported",
}

TWICE = (
    "gradients would be clipped twice, by two callbacks of the kind GradClipCallback: leave one of "
    "them out"
)


def require_suitable(trainer: "Trainer", module: "LightningModule", kind: type["Callback"]) -> None:
    """Raise `RuntimeError` if somebody else clips, be it another callback of this `kind`, or nobody
    can."""
    if not any(optimizer.param_groups for optimizer in trainer.optimizers):
        raise RuntimeError(
            "GradClipCallback clips before an optimizer's step, and configure_optimizers returned "
            "no optimizer"
        )
    if trainer.gradient_clip_val:
        raise RuntimeError(
            "gradients would be clipped twice, by Trainer(gradient_clip_val="
            f"{trainer.gradient_clip_val!r}) and by GradClipCallback: leave one of them out"
        )
    if sum(isinstance(each, kind) for each in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        raise RuntimeError(TWICE)
    owner = next(k for k in type(module).__mro__ if "configure_gradient_clipping" in vars(k))
    if owner.__name__ != "LightningModule" and module.automatic_optimization:
        raise RuntimeError(
            "gradients would be clipped twice, by configure_gradient_clipping of "
            f"{owner.__name__} and by GradClipCallback: leave one of them out"
        )
    for strategy in type(trainer.strategy).__mro__:
        if (name := strategy.__name__) in UNSUITABLE:
            raise RuntimeError(f"GradClipCallback cannot clip under {name}: {UNSUITABLE[name]}")


def require_monitors(trainer: "Trainer", monitors: Sized) -> None:
    """Raise `ValueError` if there are some, and not one for each optimizer."""
    count = len(trainer.optimizers)
    if len(monitors) not in (0, count):
        raise ValueError(
            f"monitor has {len(monitors)} for {count} optimizers, whose norms have nothing to do "
            "with each other: pass a list with one for each, or None"
        )


def require_going_back(trainer: "Trainer", module: "LightningModule") -> None:
    """Raise `ValueError` where a rollback in place is not possible."""
    why = None
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        why = "one optimizer and automatic optimisation"
    elif trainer.world_size > 1:
        why = "one process"
    if why is not None:
        raise ValueError(
            f'a RollbackPolicy as on_critical needs {why}: use on_critical="stop", and go on from '
            "a checkpoint of the trainer"
        )


def inner_of(optimizer: Any) -> Optimizer:
    """The optimizer that the hooks are given; it may be wrapped where the module made it."""
    wrapped = "LightningOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}
    inner: Optimizer = optimizer.optimizer if wrapped else optimizer
    return inner


def log_step_of(trainer: "Trainer") -> int:
    """The step that the module's own metrics of this batch are logged with."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def scaler_of(trainer: "Trainer") -> GradScaler | None:
    """Of the precision plugin, if it scales the loss."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def monitors_of(monitor: Any) -> tuple[Monitor | None, ...]:
    """Of one or several, or none; `TypeError` for anything else."""
    each = () if monitor is None else (monitor,) if isinstance(monitor, Monitor) else monitor
    if not isinstance(each, Sequence) or not all(isinstance(one, Monitor | None) for one in each):
        raise TypeError(f"monitor must be a Monitor or a list of them, got {monitor!r:.80}")
    return tuple(each)


def require_clippable(args: "TrainingArguments", model: Any) -> None:
    """Raise `ValueError` if somebody else clips, or nobody can."""
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


def unwrapped(optimizer: Any) -> tuple[Optimizer, GradScaler | None]:
    """The optimizer inside of accelerate's, and the scaler that steps it, if one is in use."""
    inner, scaler = accelerated.unwrapped(optimizer, None)
    (inner,) = inner if isinstance(inner, list) else [inner]
    return inner, scaler if scaler is not None and scaler.is_enabled() else None


def on_any(flag: bool, args: "TrainingArguments") -> bool:
    """Whether it is set on a rank: what a monitor's own watches measured differs between them."""
    if args.world_size == 1:
        return flag
    flags = torch.tensor(flag, dtype=torch.int32, device=args.device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return bool(flags)
