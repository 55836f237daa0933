"""What rolls a run back, and what is told of it: plain data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastclip.checks import require
from fastclip.monitor.records import LEVELS, Event, Level

_COUNTS = ("confirm", "before", "after", "lr_steps", "max_rollbacks")


@dataclass(frozen=True)
class RollbackPolicy:
    """When to roll back, what to skip then, and how often.

    Args:
        on: events of this level or a higher one roll back; or a predicate of an event. On several
            ranks it has to answer the same on each.
        confirm: a checkpoint is good once this many steps after it raised no such event.
        before: suspect are the batches of the steps from ``onset - before`` ...
        after: ... to ``alarm + after``.
        lr_scale: after a rollback the learning rate is multiplied by this ...
        lr_steps: ... for this many steps.
        max_rollbacks: for the whole run.
        ranks: the ranks whose batches are to blame for an event; None, or an answer of None, means
            all of them. The others go on with the batches that they would have had.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    on: Level | Callable[[Event], bool] = "critical"
    confirm: int = 100
    before: int = 1
    after: int = 0
    lr_scale: float = 0.5
    lr_steps: int = 200
    max_rollbacks: int = 3
    ranks: Callable[[Event], Iterable[int] | None] | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.on, str)
        if not (callable(self.on) or (named and self.on in LEVELS)):
            names = ", ".join(map(repr, LEVELS))
            kind = ValueError if named else TypeError
            raise kind(f"on must be one of {names} or a function, got {self.on!r:.80}")
        for name in _COUNTS:
            value, what = getattr(self, name), "a whole number of at least 0"
            require(name, value, what, lambda x: x >= 0, whole=True)
        require("lr_scale", self.lr_scale, "a finite number of at least 0", lambda x: x >= 0)
        if not (self.ranks is None or callable(self.ranks)):
            raise TypeError(f"ranks must be a function or None, got {self.ranks!r:.80}")

    def matches(self, event: Event) -> bool:
        if callable(self.on):
            return bool(self.on(event))
        return LEVELS.index(event.level) >= LEVELS.index(self.on)

    def blamed(self, events: Iterable[Event], size: int) -> tuple[int, ...]:
        """Which of `size` ranks the batches of `events` are to be skipped on."""
        found: set[int] = set()
        for event in events:
            ranks = None if self.ranks is None else self.ranks(event)
            named = range(size) if ranks is None else ranks
            for rank in named:
                if not 0 <= rank < size:
                    raise ValueError(f"ranks gave {rank!r} for an event, of {size} ranks")
                found.add(rank)
        return tuple(sorted(found))


class Checkpoint(NamedTuple):
    """One on disk.

    Attributes:
        step: the number of updates it contains, and the next step to run.
        path: its folder.
        confirmed: whether it may be gone back to.
    """

    step: int
    path: Path
    confirmed: bool


class Rollback(NamedTuple):
    """A return to an earlier checkpoint.

    Attributes:
        step: of the alarm.
        onset: the step at which the fault began.
        target: the step that the run was taken back to.
        skipped: the batches that were taken out of the run, on this rank.
    """

    step: int
    onset: int
    target: int
    skipped: tuple[int, ...]
