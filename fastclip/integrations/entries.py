"""What a framework's log is given of the gradients: numbers under short names."""

from collections.abc import Callable

from fastclip.clipper import GradClipper
from fastclip.stats import GradStats


def block_of(name: str) -> str:
    """The block of a parameter: its name up to the first number (``transformer.h.0``), or without
    its last part where there is none (``transformer.wte``)."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)


class Entries:
    """Makes the entries, and remembers what the clipper's counters were at the one before.

    `layers`: as `GradStats.grouped`; None for no entries by block.
    """

    def __init__(self, layers: int | Callable[[str], str] | None) -> None:
        self._layers = layers
        self._counted: dict[str, int] = {}

    def begin(self, clipper: GradClipper) -> None:
        """Count from here on; after a rollback, too."""
        self._counted = {name: int(value) for name, value in clipper.counters().items()}

    def made(self, clipper: GradClipper, stats: GradStats) -> dict[str, float]:
        """Of a step with these statistics, and of those since the last call. Waits for the device.

        `grad_clip_coef` (the smallest, where they differ) and `grad_nonfinite` (elements) of the
        step, `grad_clipped` (a share) and `grad_skipped` (a number) of all since; of each block
        ``grad_norm/BLOCK`` and ``grad_max/BLOCK``.
        """
        stats, before = stats.cpu(), self._counted
        self.begin(clipper)
        since = {name: value - before[name] for name, value in self._counted.items()}
        found = {
            "grad_clip_coef": float(stats.coef.min()) if stats.coef.numel() else 1.0,
            "grad_clipped": since["clipped"] / max(since["steps"], 1),
            "grad_skipped": since["skipped"],
            "grad_nonfinite": int(stats.nonfinite_count),
        }
        for row in [] if self._layers is None else stats.grouped(self._layers).layers():
            found[f"grad_norm/{row.name}"] = row.norm
            found[f"grad_max/{row.name}"] = row.max_abs
        return found
