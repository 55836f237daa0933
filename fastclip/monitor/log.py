"""The log of a run: JSON, one record a line, only ever added to."""

import json
import math
import os
import warnings
import weakref
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fastclip.monitor.records import METRICS, NAMES, Event, LayerRow, StepRecord, make_record

TAIL = 1 << 16  # bytes read at first to find the last record
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FLOATS = frozenset(METRICS)
_KNOWN = frozenset(NAMES)
_FAULTS = (TypeError, ValueError, RecursionError)  # of a line; a JSONDecodeError is a ValueError
AMENDS = b'{"amends":'  # how the line of an amendment begins


class JSONL:
    """A log file: the sink that adds to it, and the way to read it back.

    >>> for record in JSONL("run.jsonl"): ...

    Every line is one strict JSON object: the fields of a `StepRecord` that are not None. NaN and
    infinities are the strings "nan", "inf" and "-inf", and floats survive bit for bit. The file is
    opened at the first `write` and made if it is not there; what it has stays, and a last line
    without its end is ended first, whoever left it. Where the file is deleted or moved away, a new
    one is begun in its place, with a `UserWarning`. A copy, or one that another process was sent,
    opens the file for itself.

    Iterating gives the records in order, and `amendments` what `amend` added to some of them later,
    in lines of their own. A line that is neither, such as the last one of a process that was
    killed, is skipped with a `UserWarning`; unknown keys and blank lines are nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # wherever the program goes to
        self._file: int | None = None  # open for appending

    def __enter__(self) -> "JSONL":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["JSONL"], tuple[Path]]:
        return type(self), (self.path,)  # the number of an open file means nothing elsewhere

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Add the record as one line; events are what `Monitor.replay` makes of it again.

        The line is the operating system's when this returns: a killed process loses nothing of it.
        """
        self._append(encode(record))

    def amend(self, record: StepRecord) -> None:
        """Add the rows of layers of a record that was written without, as a line of their own."""
        self._append(encode_amendment(record))

    def close(self) -> None:
        """Close the file; a `write` after it opens it again."""
        if self._file is not None:
            self._closing()
            self._file = None

    def _append(self, line: bytes) -> None:
        moved = self._file is not None and not self._in_place(self._file)
        if moved:
            self.close()
        if self._file is None:
            self._file = self._opened()
        if os.lseek(self._file, 0, os.SEEK_END):
            os.lseek(self._file, -1, os.SEEK_END)
            if os.read(self._file, 1) != b"\n":
                line = b"\n" + line  # a writer was killed, or a full disk took only a part
        while line:
            line = line[os.write(self._file, line) :]
        if moved:
            text = f"{self.path} was deleted or moved away: this record begins a new file"
            warnings.warn(text, UserWarning, stacklevel=3)

    def _in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(file))
        except FileNotFoundError:
            return False

    def _opened(self) -> int:
        # O_APPEND: a write is one system call that adds at the end, wherever that then is.
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._closing = weakref.finalize(self, os.close, file)
        return file

    def __iter__(self) -> Iterator[StepRecord]:
        with self.path.open("rb") as file:
            yield from records(file, self._warn)

    def amendments(self) -> Iterator[StepRecord]:
        """What `amend` added, in order: records of a step, an attempt and rows of layers."""
        with self.path.open("rb") as file:
            yield from amendments(file, self._warn)

    def _warn(self, line: int, reason: str) -> None:
        text = f"{self.path}, line {line}: skipped, for it is not a record: {reason}"
        warnings.warn(text, UserWarning, stacklevel=4)

    def last(self) -> StepRecord | None:
        """The last record; None without a file, or without a record in it."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            return _last(file)


def records(
    lines: Iterable[bytes],
    skipped: Callable[[int, str], object],
    amended: Callable[[StepRecord], object] | None = None,
) -> Iterator[StepRecord]:
    """The records among `lines`; `skipped` is told the number and the fault of every line that is
    neither one nor an amendment, and `amended` is given the amendments.
    """
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            values = _object(line)
            if "amends" in values:
                if amended is not None:
                    amended(decode_amendment(line))
                continue
            record = _record(values)
        except _FAULTS as error:
            skipped(number, _said(error))
        else:
            yield record


def amendments(
    lines: Iterable[bytes], skipped: Callable[[int, str], object]
) -> Iterator[StepRecord]:
    """The amendments among `lines`; `skipped` is told those that are none but begin like one."""
    for number, line in enumerate(lines, 1):
        if not line.startswith(AMENDS):  # of lines without it nothing has to be parsed
            continue
        try:
            record = decode_amendment(line)
        except _FAULTS as error:
            skipped(number, _said(error))
        else:
            yield record


def _said(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.pos + 1})"
    return str(error)


def encode(record: StepRecord) -> bytes:
    """The line of a record, newline included. `TypeError` if `batch` is not of what JSON has."""
    values = {
        name: value if type(value) is float and math.isfinite(value) else _strict(value)
        for name in NAMES
        if (value := getattr(record, name)) is not None
    }
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, LayerRow):
        value = {name: item for name, item in value._asdict().items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def encode_amendment(record: StepRecord) -> bytes:
    """The line that gives rows of layers to a record before it."""
    values = {"amends": record.step, "attempt": record.attempt, "layers": _strict(record.layers)}
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> StepRecord:
    """The record of a line. `TypeError` or `ValueError` with the reason if it is none."""
    return _record(_object(line))


def decode_amendment(line: bytes) -> StepRecord:
    """What a line gives to a record before it; errors as of `decode`."""
    values = _object(line)
    return _record({**values, "step": values["amends"]})


def _object(line: bytes) -> dict[str, Any]:
    values = json.loads(line.removeprefix(BOM_UTF8).decode())
    if not isinstance(values, dict):
        raise TypeError(f"it is a {type(values).__name__}, not an object")
    return values


def _record(values: Mapping[str, Any]) -> StepRecord:
    fields = {name: value for name, value in values.items() if name in _KNOWN}
    for name, value in fields.items():
        if type(value) is str and name in _FLOATS and value in _SPECIAL:
            fields[name] = _SPECIAL[value]
    return make_record(fields)


def _last(file: BinaryIO) -> StepRecord | None:
    end = file.seek(0, os.SEEK_END)
    size = TAIL
    while True:
        start = max(0, end - size)
        file.seek(start)
        lines = file.read(end - start).split(b"\n")
        for line in reversed(lines if start == 0 else lines[1:]):  # the first may be cut
            for record in records([line], lambda number, reason: None):
                return record
        if start == 0:
            return None
        size *= 2
