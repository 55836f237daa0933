"""Optimizers that accelerate has prepared: what they add to the step, without importing accelerate.

Such a wrapper steps only when the gradients are complete, and keeps the scaler: its own step calls
``scaler.step`` of the optimizer within, and ``scaler.update``.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip.clipper import GradClipper
    from fastclip.stats import GradStats


def among(optimizer: Any) -> list[Any]:
    """Those of one optimizer, or of a list or tuple of them, that accelerate has prepared."""
    module = sys.modules.get("accelerate.optimizer")  # nobody has one without it
    if module is None:
        return []
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    return [each for each in several if isinstance(each, module.AcceleratedOptimizer)]


def unwrapped(optimizer: Any, scaler: Any) -> tuple[Any, Any]:
    """The optimizers within, and the scaler that theirs is; anything else as it was passed.

    Raises `TypeError` for a wrapper that does not step the optimizer within, and for another scaler
    than accelerate's; `RuntimeError` for processes of XLA.
    """
    wrappers = among(optimizer)
    if not wrappers:
        return optimizer, scaler
    for wrapper in wrappers:
        _require_plain(wrapper)
        if scaler is not None and scaler is not wrapper.scaler:
            raise TypeError(
                "scaler must be the one that accelerate has given the optimizer, which is taken if "
                f"none is passed; got another {type(scaler).__name__}"
            )
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    return [each.optimizer if each in wrappers else each for each in several], wrappers[0].scaler


def clip_(clipper: "GradClipper", optimizer: Any, scaler: Any) -> "GradStats":
    """Clip if the gradients are complete; else measure what has been accumulated.

    Raises as `unwrapped`.
    """
    inner, scaler = unwrapped(optimizer, scaler)
    return clipper.clip_(inner, scaler) if _complete(optimizer) else clipper.measure()


def step(clipper: "GradClipper", optimizer: Any, scaler: Any) -> "GradStats":
    """Clip and step if the gradients are complete; else measure what has been accumulated.

    Raises as `unwrapped`, and `RuntimeError` for several optimizers with an enabled scaler.
    """
    inner, scaler = unwrapped(optimizer, scaler)
    if not _complete(optimizer):
        return clipper.measure()
    if scaler is None or not scaler.is_enabled():
        return clipper.step(inner)
    if len(inner) > 1:
        raise RuntimeError(
            f"accelerate updates the loss scale after each of the {len(inner)} optimizers, so that "
            "the second would be unscaled by another scale: with fp16 use one optimizer with "
            "parameter groups"
        )
    stats = clipper.clip_(inner, scaler)
    # skips if need be, updates the scale and notes whether it has skipped
    among(optimizer)[0].step()
    return stats


def _complete(optimizer: Any) -> bool:
    """Whether accelerate's optimizers would step: they do not while gradients accumulate."""
    return all(wrapper.gradient_state.sync_gradients for wrapper in among(optimizer))


def _require_plain(wrapper: Any) -> None:
    module = sys.modules["accelerate.optimizer"]
    if type(wrapper) is not module.AcceleratedOptimizer:
        raise TypeError(
            f"{type(wrapper).__name__} does not step the optimizer that it wraps: its engine "
            "clips and steps by itself, and is told the threshold in its own configuration"
        )
    kind = wrapper.accelerator_state.distributed_type
    if kind == module.DistributedType.XLA:
        raise RuntimeError(
            "accelerate sums the gradients of XLA processes in the step of its optimizer, after "
            "they would have been clipped: GradClipper cannot be used there"
        )
