"""Going back in place, in a loop that belongs to a framework."""

import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy
from fastclip.monitor.recovery.stateful import Stateful


class Rollbacks:
    """A `Recovery` whose loop is asked for its next step by somebody else's.

    It lasts for one run of a process: its checkpoints are in a temporary folder, which `close`
    removes. The batches are the framework's, which go on whatever is taken back.

    Args:
        folder: where the temporary folder is made.
        state: as of `Recovery`, without the monitor.
        monitor: whose events say when to go back.
        policy: `max_rollbacks` are those that are left.
        every: updates between two checkpoints.
        first: the step that the monitor is told of the first update.
    """

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Stateful],
        monitor: Monitor,
        policy: RollbackPolicy,
        *,
        every: int,
        first: int,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(prefix="fastclip-rollback-", dir=folder)
        self._monitor, self._every, self._first = monitor, every, first
        self._recovery = Recovery(
            self._folder.name, {**state, "monitor": monitor}, policy, every=every
        )
        steps = self._recovery.steps(sys.maxsize)
        self._loop = cast(Generator[tuple[int, int], None, None], steps)  # which can be closed
        self._next = 0  # the step that comes if nothing is taken back, counted from `first`

    @property
    def used(self) -> int:
        """Rollbacks so far."""
        return len(self._recovery.rollbacks)

    @property
    def lr_scale(self) -> float:
        """What the learning rates of the update that is going on are multiplied by."""
        return self._recovery.lr_scale

    def advance(self) -> int:
        """Between two updates, and before the first: write a checkpoint or go back to one, if that
        is due; the number of updates that were taken back."""
        if self._next and self._next % self._every == 0:
            self.handle(self._monitor.flush())  # all that is known of what the checkpoint holds
        step, _ = next(self._loop)
        undone = self._next - step
        self._next = step + 1
        return undone

    def finish(self) -> int:
        """After the last update: what its events still call for; as `advance`."""
        return self.advance() if self.handle(self._monitor.flush()) else 0

    def handle(self, events: Iterable[Event]) -> bool:
        """Decide what to do about the monitor's events; whether to go back, at `advance`."""
        return self._recovery.handle(
            replace(
                event,
                step=event.step - self._first,
                onset=None if event.onset is None else max(event.onset - self._first, 0),
            )
            for event in events
        )

    def close(self) -> None:
        """Forget the checkpoints, and cut learning rates no longer."""
        self._loop.close()
        self._folder.cleanup()
