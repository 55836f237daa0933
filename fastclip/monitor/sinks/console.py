"""The sink for people: one live line, and the last events under it."""

import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastclip.monitor.records import Event, Level, StepRecord
from fastclip.monitor.sinks.client import client
from fastclip.monitor.sinks.scalars import sentence

if TYPE_CHECKING:
    from rich.text import Text

RATE_OVER = 100  # records, for the share of clipped ones
CALM = 10  # records without an event like it, after which an event counts as a new one
SECONDS = 0.1  # between two pictures of the live line
STYLES: dict[Level, str] = {"info": "cyan", "warn": "yellow", "critical": "bold red"}


@dataclass
class _Seen:
    """An event, and how many like it there were without `CALM` records between two of them."""

    event: Event
    count: int
    newest: int  # number of the record of the last of them


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
        self._text: type[Text] = client("Console", "console", "rich.text").Text
        self._console = rich.Console(stderr=True) if console is None else console
        self._group = rich.Group
        self._every, self._shown = every, events
        self._live: Any = None
        self._drawn = -math.inf
        self._records = 0
        self._clipped: deque[bool] = deque(maxlen=RATE_OVER)
        self._seen: dict[tuple[str, str, Level], _Seen] = {}
        self._repeated = 0  # events only counted since the last plain line
        self._line: Text | None = None

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Show the record: draws or prints, and waits for the terminal to take it."""
        if record.clipped is not None:
            self._clipped.append(record.clipped)
        new = [event for event in events if self._is_new(event)]
        self._line = self._about(record)
        if self._console.is_interactive:
            self._draw(bool(new))
        else:
            self._print(new)
        self._records += 1

    def close(self) -> None:
        """Show the newest record, and leave the terminal as it was."""
        if self._live is not None:
            self._live.update(self._picture())
            self._live = None
            self._stop()

    def _is_new(self, event: Event) -> bool:
        key = event.kind, event.metric, event.level
        seen = self._seen.pop(key, None)  # the newest is the last
        if seen and self._records - seen.newest <= CALM:
            self._seen[key] = _Seen(seen.event, seen.count + 1, self._records)
            self._repeated += 1
            return False
        self._seen[key] = _Seen(event, 1, self._records)
        return True

    def _draw(self, at_once: bool) -> None:
        if self._live is None:
            self._live = self._live_class(
                console=self._console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start()
            # A program that ends without close would leave the cursor hidden.
            self._stop = weakref.finalize(self, self._live.stop)
        now = time.monotonic()
        if at_once or now - self._drawn >= SECONDS:
            self._drawn = now
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Any:
        last = list(self._seen.values())[-self._shown :]
        return self._group(self._line, *(self._event(seen.event, seen.count) for seen in last))

    def _print(self, new: Sequence[Event]) -> None:
        if self._records % self._every == 0 and self._line is not None:
            if self._repeated:
                self._line.append(f"  ({self._repeated} more events like those before)")
                self._repeated = 0
            self._console.print(self._line, soft_wrap=True)
        for event in new:
            self._console.print(self._event(event, 1), soft_wrap=True)

    def _event(self, event: Event, count: int) -> "Text":
        times = f" (and {count - 1} more)" if count > 1 else ""
        return self._text(
            sentence(event) + times, STYLES[event.level], no_wrap=True, overflow="ellipsis"
        )

    def _about(self, record: StepRecord) -> "Text":
        line = self._text(f"step {record.step}", "bold", no_wrap=True, overflow="ellipsis")
        rate = sum(self._clipped) / len(self._clipped) if self._clipped else None
        numbers = {
            "loss": _short(record.loss),
            "val loss": _short(record.val_loss),
            "grad norm": _short(record.grad_norm),
            "clipped": None if rate is None else f"{rate:.0%} of {len(self._clipped)}",
            "lr": _short(record.lr),
            "scale": _short(record.loss_scale),
            "attempt": str(record.attempt) if record.attempt else None,
        }
        for name, number in numbers.items():
            if number is not None:
                line.append(f"  {name} ", "dim")
                line.append(number, "bold red" if number in ("nan", "inf", "-inf") else "not bold")
        if record.skipped:
            line.append("  skipped", "yellow")
        return line


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
