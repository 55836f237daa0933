"""Standard output, whose own errors can be told from all others."""

import os
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output takes no more; the cause is the `OSError`.

    Not an `OSError` itself: argparse passes over those.
    """


class Output:
    """A text stream whose write and flush raise `OutputError`, and that is otherwise the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error.strerror) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error.strerror) from error

    def discard(self) -> None:
        """Let what is still buffered go nowhere: Python would complain again when it flushes at
        exit."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
