"""What a framework's log is given of the gradients: numbers under short names."""

from collections.abc import Callable

from fastclip.checks import require
from fastclip.clipper import GradClipper
from fastclip.integrations._skipped import Skipped
from fastclip.stats import GradStats

Layers = int | Callable[[str], str] | None


def block_of(name: str) -> str:
    """The block of a parameter: its name up to the first number (``transformer.h.0``), or without
    its last part where there is none (``transformer.wte``)."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)


def require_layers(layers: object) -> None:
    """Raise `TypeError` or `ValueError` for what does not say how rows are grouped."""
    if layers is not None and not callable(layers):
        what = "a whole number of at least 1, a function of a name, or None"
        require("layers", layers, what, lambda depth: depth >= 1, whole=True)


class Entries:
    """Makes the entries of a clipper, whose counters at the newest one are `counted`.

    `skipped` tells of steps that are skipped; those that it was not told of are told of here.

    `layers`: as `GradStats.grouped`; None for no entries by block.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.counted: dict[str, int] = {}
        self.skipped = Skipped()

    def begin(self, clipper: GradClipper) -> None:
        """Count from here on; after a rollback, too."""
        self.counted = _counters(clipper)
        self.skipped.begin()

    def end(self, clipper: GradClipper, step: int) -> None:
        """Tell of what was skipped since the last entries, up to `step`. Waits for the device."""
        self.skipped.counted(step, self._since(_counters(clipper)), None)

    def made(self, clipper: GradClipper, stats: GradStats, step: int) -> dict[str, float]:
        """Of a step with these statistics, and of those since the last call. Waits for the device.

        `grad_norm` (before clipping, without a loss scale), `grad_clip_coef` (the smallest, where
        they differ), `grad_nonfinite` (elements) and, under a scaler, `loss_scale` of the step;
        `grad_clipped` (a share) and `grad_skipped` (a number) of all since; of each block
        ``grad_norm/BLOCK`` and ``grad_max/BLOCK``.
        """
        stats, counted = stats.cpu(), _counters(clipper)
        since, self.counted = self._since(counted), counted
        self.skipped.counted(step, since, stats)
        self.skipped.row()
        found = {
            "grad_norm": float(stats.total_norm),
            "grad_clip_coef": float(stats.coef.min()) if stats.coef.numel() else 1.0,
            "grad_clipped": since["clipped"] / max(since["steps"], 1),
            "grad_skipped": since["skipped"],
            "grad_nonfinite": int(stats.nonfinite_count),
        }
        if stats.loss_scale is not None:
            found["loss_scale"] = float(stats.loss_scale)
        for row in [] if self._layers is None else stats.grouped(self._layers).layers():
            found[f"grad_norm/{row.name}"] = row.norm
            found[f"grad_max/{row.name}"] = row.max_abs
        return found

    def _since(self, counted: dict[str, int]) -> dict[str, int]:
        return {name: value - self.counted.get(name, 0) for name, value in counted.items()}


def _counters(clipper: GradClipper) -> dict[str, int]:
    return {name: int(value) for name, value in clipper.counters().items()}
