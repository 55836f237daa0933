"""What a Trainer of Lightning has to be, for the callback that clips."""

from collections.abc import Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Their gradients are pieces of flat buffers, or are kept where no parameter shows them.
UNSUITABLE = {
    "FSDPStrategy": "FSDP 1 keeps gradients in flat pieces whose norm no rank knows: use "
    "ModelParallelStrategy, whose gradients are DTensors",
    "DeepSpeedStrategy": 'DeepSpeed clips by itself: set "gradient_clipping" in its config',
    "XLAStrategy": "XLA gradients are not supported",
}


def require_suitable(trainer: "Trainer") -> None:
    """Raise `RuntimeError` if somebody else clips, or nobody can."""
    if trainer.gradient_clip_val:
        raise RuntimeError(
            "gradients would be clipped twice, by Trainer(gradient_clip_val="
            f"{trainer.gradient_clip_val!r}) and by GradClipCallback: leave one of them out"
        )
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in UNSUITABLE:
            raise RuntimeError(
                f"GradClipCallback cannot clip under {kind.__name__}: {UNSUITABLE[kind.__name__]}"
            )


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
