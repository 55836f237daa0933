"""What a rollback must not take back: `recovery.json`, beside the checkpoints."""

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

from fastclip.monitor.recovery.files import to_json, write_atomically

NAME = "recovery.json"
VERSION = 1


class Decision(NamedTuple):
    """One rollback, as all ranks know it."""

    step: int  # of the alarm
    onset: int
    target: int
    cut_until: int  # the first step whose learning rate is the schedule's again
    skipped: tuple[tuple[int, ...], ...]  # by rank


class Ledger:
    """Rollbacks, the batches they took out, and how far checkpoints are confirmed.

    Args:
        folder: where `recovery.json` is or will be.
        size: the number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / NAME
        self.size = size
        self.rollbacks: tuple[Decision, ...] = ()
        self.confirmed = -1  # checkpoints up to this step are
        self.pending: int | None = None  # the target of a rollback that was not carried out yet
        self._skipped: list[list[int]] = [[] for _ in range(size)]

    def skipped(self, rank: int) -> list[int]:
        """Ascending."""
        return list(self._skipped[rank])

    def batch(self, rank: int, step: int) -> int:
        """The number of the batch of a step: the step-th of those that are not skipped.

        A rollback skips no batch from before its target, so what this says of the steps that the
        checkpoints contain never changes.
        """
        number = step
        for skipped in self._skipped[rank]:
            if skipped > number:
                break
            number += 1
        return number

    def cut(self, step: int) -> bool:
        """Whether the learning rate of a step is cut: the last rollback from before it decides."""
        for rollback in reversed(self.rollbacks):
            if rollback.target <= step:
                return step < rollback.cut_until
        return False

    def add(self, decision: Decision) -> None:
        self.rollbacks = (*self.rollbacks, decision)
        self._take_out(decision)
        self.confirmed = min(self.confirmed, decision.target)
        self.pending = decision.target

    def first(self, n: int) -> "Ledger":
        """As it was after the first `n` rollbacks, for `batch` and `cut`."""
        earlier = Ledger(self.path.parent, self.size)
        for decision in self.rollbacks[:n]:
            earlier.add(decision)
        return earlier

    def _take_out(self, decision: Decision) -> None:
        for batches, out in zip(self._skipped, decision.skipped, strict=True):
            for batch in out:
                place = bisect_left(batches, batch)
                if batches[place : place + 1] != [batch]:
                    batches.insert(place, batch)

    def write(self) -> None:
        """To the disk, whole or not at all; `OSError` if that fails."""
        content = {
            "version": VERSION,
            "ranks": self.size,
            "confirmed": self.confirmed,
            "pending": self.pending,
            "rollbacks": [rollback._asdict() for rollback in self.rollbacks],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, to_json(content) + b"\n")
        except OSError as error:
            text = f"{self.path} could not be written: {error}; it is as it was"
            raise OSError(text) from error

    def read(self) -> bool:
        """Take up what is on disk; False if nothing is. `ValueError` if it cannot be used."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        try:
            self._take_up(json.loads(content))
        except (TypeError, KeyError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"{self.path}, which has the rollbacks and skipped batches of this run, "
                f"cannot be used: {error}"
            ) from error
        return True

    def _take_up(self, saved: dict[str, Any]) -> None:
        if saved["version"] != VERSION:
            raise ValueError(f"it has version {saved['version']!r}, where {VERSION} is known")
        if saved["ranks"] != self.size:
            raise ValueError(f"it is of a run on {saved['ranks']} ranks, and here are {self.size}")
        for fields in saved["rollbacks"]:
            skipped = tuple(tuple(map(int, batches)) for batches in fields.pop("skipped"))
            decision = Decision(
                **{name: int(value) for name, value in fields.items()}, skipped=skipped
            )
            self.rollbacks = (*self.rollbacks, decision)
            self._take_out(decision)
        self.confirmed, pending = int(saved["confirmed"]), saved["pending"]
        self.pending = None if pending is None else int(pending)
