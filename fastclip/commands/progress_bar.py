"""How far long work is: one line on stderr, rewritten on a terminal, a line a step elsewhere."""

import shutil
import sys
import time
from typing import TextIO

BAR = 20  # characters
ERASE = "\r\x1b[K"


class Progress:
    """Counts parts of work that take about as long as each other."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._begun = total, 0
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._terminal = self._stream.isatty()

    def begin(self, name: str) -> None:
        """The part called `name` begins, the one before it has ended."""
        done, self._begun = self._begun, self._begun + 1
        if self._terminal:
            bar = "#" * (BAR * done // self._total)
            line = f"[{bar:-<{BAR}}] {done}/{self._total}{self._left(done)}  {name}"
            self._write(ERASE + line[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(f"[{self._begun}/{self._total}] {name}\n")

    def clear(self) -> None:
        """Takes the line off a terminal, for a line of the result to stand there."""
        if self._terminal:
            self._write(ERASE)

    def _left(self, done: int) -> str:
        if not done:
            return ""
        seconds = (time.monotonic() - self._start) / done * (self._total - done)
        return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
