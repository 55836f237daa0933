"""A run with all that is hard on a client, and what has to be read back of it."""

import math
from typing import Any

from fastclip.monitor import Event, LayerRow, Sink, StepRecord

NAN, INF = math.nan, math.inf

LAYERS = ("block.0.weight", "a/b", "a/b/norm", "w[0] \N{GREEK SMALL LETTER ALPHA}", "x" * 300, "..")

# Steps of two attempts: the second goes back to step 3.
STEPS = [(0, step) for step in range(6)] + [(1, step) for step in range(3, 8)]

NONFINITE = Event(2, "nonfinite", "critical", "loss", NAN, onset=1, message="loss is nan")
SPIKES = [
    Event(4, "spike", "warn", metric, 2.0, message=f"{metric} [bold]__is__[/bold] 2")
    for metric in ("loss", "grad_norm")
]


def run() -> list[tuple[StepRecord, list[Event]]]:
    """Records, NaN, infinite, empty and full, with events at steps 2 and 4 of attempt 0."""
    made = []
    for attempt, step in STEPS:
        fields: dict[str, Any] = {"loss": 8.0 * attempt + step / 4, "clipped": step % 2 == 0}
        if attempt == 0:
            fields.update({2: {"loss": NAN}, 4: {"grad_norm": INF, "lr": -INF}}.get(step, {}))
            if step == 3:
                fields["layers"] = tuple(
                    LayerRow(name, norm=place + 0.5, max_abs=NAN, nonfinite=0.25)
                    for place, name in enumerate(LAYERS)
                )
            if step == 5:
                fields = {}
        events = {(0, 2): [NONFINITE], (0, 4): SPIKES}.get((attempt, step), [])
        made.append((StepRecord(step, attempt=attempt, **fields), events))
    return made


def write(sink: Sink) -> None:
    for record, events in run():
        sink.write(record, events)


def expected(name: str) -> list[tuple[int, int, float]]:
    """Attempt, step and value of a field wherever it is not None."""
    return [
        (record.attempt, record.step, float(value))
        for record, _ in run()
        if (value := getattr(record, name)) is not None
    ]


def same(first: object, second: object) -> bool:
    """Equal, and NaN equals NaN."""
    return repr(first) == repr(second)
