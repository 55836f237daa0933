"""The log that a command reads: its faults told in one place, its length counted on the way."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fastclip.commands import InputError
from fastclip.monitor import StepRecord
from fastclip.monitor.log import records

SHOWN = 20  # skipped lines that are listed
CHECKED = 5_000  # lines between looks at the clock
PATIENCE = 0.5  # seconds before progress is shown, and between its updates


@dataclass
class Log:
    """The records of a log file, to go through once, and what was seen of it.

    `amended` is given what was added to records later. Raises `InputError` where the file cannot be
    read or has no record.
    """

    path: str
    amended: Callable[[StepRecord], object] | None = None
    records: int = 0
    skipped_lines: int = 0
    first: int = 0  # step of the first record
    last: int = 0  # largest step
    _faults: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[StepRecord]:
        try:
            with Path(self.path).open("rb") as file:
                for record in records(_watched(file), self._skip, self.amended):
                    if not self.records:
                        self.first = self.last = record.step
                    self.records += 1
                    self.last = max(self.last, record.step)
                    yield record
        except OSError as error:
            raise InputError(f"cannot read {self.path!r}: {error.strerror}") from error
        if not self.records:
            none = ": no line of it is a record" if self.skipped_lines else ""
            raise InputError(f"there are no records in {self.path!r}{none}")

    def report_skipped(self) -> None:
        """List the lines that are no records on stderr."""
        for fault in self._faults:
            print(fault, file=sys.stderr)
        if self.skipped_lines > SHOWN:
            print(f"and {self.skipped_lines - SHOWN:,} more", file=sys.stderr)

    def _skip(self, line: int, reason: str) -> None:
        self.skipped_lines += 1
        if self.skipped_lines <= SHOWN:
            self._faults.append(f"{self.path}, line {line}: skipped, not a record: {reason}")

    def __str__(self) -> str:
        skipped = f", {counted(self.skipped_lines, 'line')} skipped" if self.skipped_lines else ""
        records = counted(self.records, "record")
        return f"{self.path}: {records}, steps {self.first} to {self.last}{skipped}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _watched(file: BinaryIO) -> Iterator[bytes]:
    """The lines of `file`; on a terminal stderr shows how far it is, once that takes a while."""
    if not sys.stderr.isatty():
        yield from file
        return
    size = os.fstat(file.fileno()).st_size
    due = time.monotonic() + PATIENCE
    shown = False
    for number, line in enumerate(file):
        if number % CHECKED == 0 and time.monotonic() > due:
            share = f" ({file.tell() / size:.0%})" if size else ""
            print(f"\r{number:,} lines{share}", end="", file=sys.stderr, flush=True)
            due, shown = time.monotonic() + PATIENCE, True
        yield line
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
