"""What a sink is."""

from typing import Protocol

from fastclip.monitor.records import Event, StepRecord


class Sink(Protocol):
    """Where records and events go. It may also have

    * ``last() -> StepRecord | None``: the newest record it holds, of what it continues;
    * ``amend(record: StepRecord)``: takes a record that it has already (the same attempt and step),
      now with rows of layers;
    * ``close()``: called when the Monitor is closed.
    """

    def write(self, record: StepRecord, events: list[Event]) -> None: ...
