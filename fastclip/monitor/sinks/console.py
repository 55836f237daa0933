"""The sink for people: one live line, and the last events under it."""

import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastclip.monitor.bands import CALM
from fastclip.monitor.records import Event, Level, StepRecord
from fastclip.monitor.sinks.client import client
from fastclip.monitor.sinks.scalars import sentence

if TYPE_CHECKING:
    from rich.text import Text

RATE_OVER = 100  # records, for the share of clipped ones
SECONDS = 0.1  # between two pictures of the live line
STYLES: dict[Level, str] = {"info": "cyan", "warn": "yellow", "critical": "bold red"}


class Console:
    """A line about the newest record, and the last events.

    >>> Monitor(sinks=[Console()])

    On a terminal the line stays at the bottom, drawn at most ten times a second, above it what the
    program prints, and below it the last `events` events. Elsewhere (a file, a pipe, TERM=dumb) a
    line is written every `every` records, and one for each event. An event of the kind, metric and
    level of one at most ten records ago is only counted. Output goes to the standard error unless
    `console`, a `rich.console.Console`, says otherwise.

    `close`, or the end of the program, leaves the last line standing and gives the terminal back.
    Other programs that draw at the bottom, such as progress bars of tqdm, cannot share it.
    """

    def __init__(self, *, every: int = 100, events: int = 3, console: Any = None) -> None:
        for name, value in (("every", every), ("events", events)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        rich = client("Console", "console", "rich.console")
        self._live_class = client("Console", "console", "rich.live").Live
        self._console = rich.Console(stderr=True) if console is None else console
        self._every = every
        self._picture = _Picture(client("Console", "console", "rich.text").Text, events)
        self._live: Any = None
        self._drawn = -math.inf

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Show the record: draws or prints, and waits for the terminal to take it."""
        new = self._picture.take(record, events)
        if self._console.is_interactive:
            self._draw(bool(new))
            return
        if (self._picture.records - 1) % self._every == 0:
            self._print(self._picture.line(record, self._picture.repeated()))
        for event in new:
            self._print(self._picture.event(event))

    def close(self) -> None:
        """Show the newest record, and leave the terminal as it was."""
        if self._live is not None:
            self._live = None
            self._stop()

    def _draw(self, at_once: bool) -> None:
        if self._live is None:
            self._live = self._live_class(
                self._picture, console=self._console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start()
            # A program that ends without close would leave the cursor hidden.
            self._stop = weakref.finalize(self, self._live.stop)
        now = time.monotonic()
        if at_once or now - self._drawn >= SECONDS:
            self._drawn = now
            self._live.refresh()

    def _print(self, line: "Text") -> None:
        self._console.print(line, soft_wrap=True)


@dataclass
class _Seen:
    """An event, and how many like it there were without `CALM` records between two of them."""

    event: Event
    count: int
    newest: int  # number of the record of the last of them


class _Picture:
    """The newest record and the last events; rich asks it for its text when it draws."""

    def __init__(self, text: "type[Text]", shown: int) -> None:
        self._text, self._shown = text, shown
        self._record: StepRecord | None = None
        self.records = 0
        self._clipped: deque[bool] = deque(maxlen=RATE_OVER)
        self._seen: dict[tuple[str, str, Level], _Seen] = {}
        self._repeated = 0

    def take(self, record: StepRecord, events: Sequence[Event]) -> list[Event]:
        """The events that are not like one of just before."""
        self._record = record
        self.records += 1
        if record.clipped is not None:
            self._clipped.append(record.clipped)
        return [event for event in events if self._is_new(event)]

    def repeated(self) -> int:
        """Events that were only counted since the last call."""
        count, self._repeated = self._repeated, 0
        return count

    def __rich__(self) -> "Text":
        last = list(self._seen.values())[-self._shown :]
        lines = [self.event(seen.event, seen.count - 1) for seen in last]
        if self._record is not None:
            lines.insert(0, self.line(self._record))
        return self._text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def event(self, event: Event, more: int = 0) -> "Text":
        line = sentence(event) + (f" (and {more} more)" if more else "")
        return self._text(line, STYLES[event.level])

    def line(self, record: StepRecord, more: int = 0) -> "Text":
        rate = sum(self._clipped) / len(self._clipped) if self._clipped else None
        numbers = {
            "step": str(record.step),
            "loss": _short(record.loss),
            "val loss": _short(record.val_loss),
            "grad norm": _short(record.grad_norm),
            "clipped": None if rate is None else f"{rate:.0%} of {len(self._clipped)}",
            "lr": _short(record.lr),
            "scale": None if record.loss_scale is None else f"{record.loss_scale:g}",
            "attempt": str(record.attempt) if record.attempt else None,
        }
        line = self._text()
        for name, number in numbers.items():
            if number is not None:
                line.append(f"  {name} " if line else f"{name} ", "dim")
                line.append(number, "bold red" if number in ("nan", "inf", "-inf") else "bold")
        line.append("  skipped" if record.skipped else "", "yellow")
        line.append(f"  ({more} more events like those before)" if more else "")
        return line

    def _is_new(self, event: Event) -> bool:
        key = event.kind, event.metric, event.level
        seen = self._seen.pop(key, None)  # the newest is the last
        if seen and self.records - seen.newest <= CALM:
            self._seen[key] = _Seen(seen.event, seen.count + 1, self.records)
            self._repeated += 1
            return False
        self._seen[key] = _Seen(event, 1, self.records)
        return True


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
