"""Going back in a training loop that is somebody else's."""

import shutil
import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer

from fastclip.monitor import Event, Recovery, RollbackPolicy
from fastclip.monitor.recovery.ranks import Ranks


class Rollbacks:
    """A `Recovery` that is asked for each step, rather than driving the loop.

    The loop goes on: its count of steps, its data and its schedules are not wound back, only the
    state is. So the options of the optimizer's groups, which are the schedules', stay as they are.

    Args:
        folder: of the checkpoints; what an earlier process has left there is removed.
        optimizer, state: what is taken back: the optimizer, and all else by name.
        policy: when to go back.
        first: the number of updates that the state has in it already.
        used: the rollbacks of earlier processes, which count for the policy's budget.
        every, keep: those of `Recovery`.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        policy: RollbackPolicy,
        *,
        first: int,
        used: int,
        every: int,
        keep: int,
    ) -> None:
        remove = partial(shutil.rmtree, folder, ignore_errors=not folder.exists())
        Ranks().first(f"removing {folder}", remove)
        self.recovery = Recovery(
            folder,
            {"optimizer": optimizer, **state},
            replace(policy, max_rollbacks=max(policy.max_rollbacks - used, 0)),
            every=every,
            keep=keep,
            rewinds=False,
            first=first,
        )
        self._optimizer = optimizer
        self._earlier = used
        steps = self.recovery.steps(sys.maxsize)
        self._loop = cast(Generator[tuple[int, int], None, None], steps)  # which can be closed

    @property
    def used(self) -> int:
        return self._earlier + len(self.recovery.rollbacks)

    def next_step(self) -> int:
        """The number of updates before the step that begins; saves the state when that is due."""
        return next(self._loop)[0]

    def back(self, events: Iterable[Event]) -> int | None:
        """Go back at once if the policy says so; the number of updates that are left, or None."""
        if not self.recovery.handle(events):
            return None
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        step = self.recovery.restore()
        for group, own in zip(self._optimizer.param_groups, options, strict=True):
            group.update(own)
        return step

    def close(self) -> None:
        self._loop.close()
