"""Going back in a training loop that is somebody else's."""

import shutil
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer

from fastclip.monitor import Event, Recovery, RollbackPolicy
from fastclip.monitor.recovery.ledger import Decision, Ledger
from fastclip.monitor.recovery.ranks import Ranks
from fastclip.monitor.recovery.telling import warn

Past = tuple[int, int, int, tuple[int, ...]]  # the fields of a `Rollback`, for a checkpoint


class Rollbacks:
    """A `Recovery` that is asked for each step, rather than driving the loop.

    The loop goes on: its count of steps, its data and its schedules are not wound back, only the
    state is. So the options of the optimizer's groups, which are the schedules', stay as they are.

    Args:
        folder: of the checkpoints; what an earlier process has left there is removed.
        optimizer, state: what is taken back: the optimizer, and all else by name.
        policy: when to go back.
        first: the number of updates that the state has in it already.
        earlier: the `past` of what this goes on from, which counts for the policy's budget; a cut
            of the learning rate lasts as long as if nothing had been interrupted.
        every, keep: those of `Recovery`.

    Warns where the policy cuts the learning rate, and the optimizer has none.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        policy: RollbackPolicy,
        *,
        first: int,
        earlier: Sequence[Past],
        every: int,
        keep: int,
    ) -> None:
        ranks = Ranks()
        ranks.first(f"emptying {folder}", lambda: _begin(folder, ranks.size, earlier, policy))
        self.recovery = Recovery(
            folder,
            {"optimizer": optimizer, **state},
            policy,
            every=every,
            keep=keep,
            rewinds=False,
            first=first,
        )
        self._optimizer = optimizer
        steps = self.recovery.steps(sys.maxsize)
        self._loop = cast(Generator[tuple[int, int], None, None], steps)  # which can be closed
        cuts = policy.lr_scale != 1.0 and policy.lr_steps > 0
        if cuts and any(group.get("lr") is None for group in optimizer.param_groups):
            warn(
                f"{type(optimizer).__name__} has no learning rate that could be multiplied by "
                f"lr_scale={policy.lr_scale:g} after a rollback, so nothing is: say "
                "RollbackPolicy(lr_scale=1.0)"
            )

    @property
    def past(self) -> list[Past]:
        """The rollbacks so far, with those from before; plain data."""
        return [(n.step, n.onset, n.target, n.skipped) for n in self.recovery.rollbacks]

    def next_step(self) -> int:
        """The number of updates before the step that begins; saves the state when that is due.

        Events that a monitor then has of late, as of numbers on a device, may make it go back.
        """
        with self._scheduled():
            return next(self._loop)[0]

    def back(self, events: Iterable[Event]) -> int | None:
        """Go back at once if the policy says so; the number of updates that are left, or None."""
        if not self.recovery.handle(events):
            return None
        with self._scheduled():
            return self.recovery.restore()

    @contextmanager
    def _scheduled(self) -> Iterator[None]:
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        yield
        for group, own in zip(self._optimizer.param_groups, options, strict=True):
            group.update(own)

    def close(self) -> None:
        self._loop.close()


def _begin(folder: Path, size: int, earlier: Sequence[Past], policy: RollbackPolicy) -> None:
    """Have no checkpoint in the folder, and of a ledger only the rollbacks from before."""
    shutil.rmtree(folder, ignore_errors=not folder.exists())
    ledger = Ledger(folder, size)
    for step, onset, target, skipped in earlier:
        cut_until = target + policy.lr_steps
        ledger.add(Decision(step, onset, target, cut_until, (tuple(skipped),) * size))
    ledger.pending = None
    ledger.write()
