"""What is said of the steps that a clipper skips."""

import logging
import math
from collections.abc import Mapping

from fastclip.monitor.bands import CALM
from fastclip.stats import GradStats


class Skipped:
    """The skipped steps of a clipper, of which the logger "fastclip" is told once an incident:
    those within 10 steps of each other are one, as critical events are.

    Steps whose flag the host knows are told of at once; of the others it learns from the clipper's
    counters, when somebody reads them.
    """

    def __init__(self) -> None:
        self._last = -math.inf  # the newest step that may have been skipped
        self._known = 0  # of those that the counters have since the newest row of a log

    def begin(self) -> None:
        """What was skipped before does not count."""
        self._last, self._known = -math.inf, 0

    def tell(self, step: int, stats: GradStats) -> None:
        """Of a step that is skipped. Waits for the device where it begins an incident."""
        self._known += 1
        if not self._begins(step, step):
            return
        stats = stats.cpu()
        bad, names = int(stats.nonfinite_count), stats.nonfinite()
        why = f"the norm of the gradients is {float(stats.total_norm)}"
        if names:  # the backward pass hands a NaN on to all parameters before
            one = "1 gradient element is" if bad == 1 else f"{bad} gradient elements are"
            why = f"{one} NaN or infinite; the last parameter with some, nearest the cause, is "
            why += names[-1]
        logging.getLogger("fastclip").warning("step %d is skipped: %s", step, why)

    def counted(self, step: int, since: Mapping[str, int], stats: GradStats | None) -> None:
        """Of those that were not yet known among the steps `since` the newest row, up to `step`,
        whose statistics are on the host."""
        steps, skipped = since["steps"], since["skipped"]
        unknown, self._known = skipped - self._known, skipped
        if unknown <= 0:
            return
        if stats is not None and stats.skipped:
            self.tell(step, stats)
        elif self._begins(step - steps + 1, step):
            logging.getLogger("fastclip").warning(
                "of the %d steps up to step %d, %d %s skipped: NaN or infinite gradients",
                *(steps, step, skipped, "was" if skipped == 1 else "were"),
            )

    def row(self) -> None:
        """A row of the log is made, from which on is counted."""
        self._known = 0

    def _begins(self, first: int, last: int) -> bool:
        """Whether steps from `first` to `last` are an incident of their own."""
        begins = last < self._last or first - self._last > CALM
        self._last = last
        return begins
