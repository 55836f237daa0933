"""What a callback does about the critical events of its monitor."""

import logging
from collections.abc import Iterable
from functools import partial
from operator import le
from typing import Any, Literal

from fastclip.checks import require
from fastclip.monitor import Event, RollbackPolicy
from fastclip.monitor.bands import CALM
from fastclip.monitor.incidents import Merging, of_event
from fastclip.monitor.sinks.scalars import sentence

OnCritical = Literal["warn", "stop"] | RollbackPolicy


def require_answers(on_critical: Any, checkpoint_every: int, keep: int, watched: bool) -> None:
    """Raise `TypeError` or `ValueError` for what is no answer to critical events, or cannot be
    given because no monitor finds any."""
    for name, value in (("checkpoint_every", checkpoint_every), ("keep", keep)):
        require(name, value, "a whole number of at least 1", partial(le, 1), whole=True)
    if not (on_critical in ("warn", "stop") or isinstance(on_critical, RollbackPolicy)):
        raise ValueError(
            f'on_critical must be "warn", "stop" or a RollbackPolicy, got {on_critical!r:.80}'
        )
    if not watched and on_critical != "warn":
        raise ValueError(
            "on_critical is about the events that a monitor finds, and there is none: pass "
            "monitor=Monitor()"
        )


class Alarms:
    """The critical events of a monitor, of which the logger "fastclip" is told once an incident."""

    def __init__(self) -> None:
        self._incidents = Merging(CALM)

    def tell(self, events: Iterable[Event], attempt: int, then: str = "") -> list[str]:
        """Tell of those that begin an incident, and what is done `then`; all critical ones."""
        told = []
        for event in events:
            if event.level != "critical":
                continue
            told.append(sentence(event))
            place = len(self._incidents.found)
            if self._incidents.add(of_event(event, attempt)) == place:
                logging.getLogger("fastclip").warning("%s%s", then, told[-1])
        return told
