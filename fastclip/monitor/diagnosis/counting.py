"""What is counted record by record: jumps of the learning rate, and skipped steps."""

from collections import deque
from typing import NamedTuple

from fastclip.monitor.records import StepRecord

JUMP = 2.0  # times as large from one record to the next
WARM = 10  # records with a rate after which a warm-up no longer doubles it in a step
NEAR = 10  # steps before the onset that a jump may be


class Jump(NamedTuple):
    step: int
    before: float
    after: float


class Rates:
    """Where the learning rate jumped up; the last of these places."""

    def __init__(self) -> None:
        self._jumps: deque[Jump] = deque(maxlen=100)
        self._last: float | None = None
        self._count = 0

    def add(self, record: StepRecord) -> None:
        if record.lr is None:
            return
        if self._count >= WARM and self._last and record.lr >= JUMP * self._last > 0:
            self._jumps.append(Jump(record.step, self._last, record.lr))
        self._last = record.lr
        self._count += 1

    def jump(self, onset: int) -> Jump | None:
        """The last one at `onset` or just before it."""
        near = [each for each in self._jumps if onset - NEAR <= each.step <= onset]
        return near[-1] if near else None


class Skipped:
    """How many steps were skipped, of those that say so; `start` is the first of the longest row
    of them, which has `row` steps."""

    def __init__(self) -> None:
        self.count = self.known = self.row = self._row = 0
        self.start: StepRecord | None = None
        self._start: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        if record.skipped is None:
            return
        self.known += 1
        if not record.skipped:
            self._row = 0
            return
        if not self._row:
            self._start = record
        self.count += 1
        self._row += 1
        if self._row > self.row:
            self.row, self.start = self._row, self._start

    def many(self) -> bool:
        """Ten in a row, or ten that are more than 5 % of all: fp16 skips about one in 2,000."""
        return self.row >= 10 or self.count >= max(10, self.known / 20)
