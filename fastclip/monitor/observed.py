"""From what a training loop has in its hands to the fields of a record. Imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip.stats import GradStats


def from_stats(stats: "GradStats") -> dict[str, Any]:
    """The fields that statistics of the gradients fill, still as tensors."""
    coef: Any = stats.coef
    if coef.dim():  # [n], from a rule per tensor
        coef = coef.min() if coef.numel() else 1.0
    return {
        "grad_norm": stats.total_norm,
        "clip_coef": coef,
        "clipped": stats.clipped,
        "nonfinite_count": stats.nonfinite_count,
        "skipped": stats.skipped,
    }


def on_host(name: str, value: Any) -> Any:
    """`value` without a tensor around it: a CPU tensor or NumPy scalar as a Python number.

    Raises `NotImplementedError` for a tensor on another device, which to read is to wait for, and
    `TypeError` for one of several elements where a number is wanted.
    """
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise NotImplementedError(
            f"{name} is on {device}, and only numbers and CPU tensors are observed so far: "
            ".item(), and .cpu() of a GradStats, wait for the device and bring them here"
        )
    if name in ("batch", "layers") or not hasattr(value, "item"):
        return value
    if hasattr(value, "detach"):  # torch warns of numbers taken out of the graph
        value = value.detach()
    try:
        return value.item()
    except (RuntimeError, ValueError) as error:
        shape = tuple(value.shape)
        raise TypeError(f"{name} must be one number, got a tensor of shape {shape}") from error
