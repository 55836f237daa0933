"""The sink for Weights & Biases."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastclip.monitor.records import Event, StepRecord
from fastclip.monitor.sinks.client import client
from fastclip.monitor.sinks.scalars import counts, scalars, sentence


class WandB:
    """A run of Weights & Biases.

    >>> Monitor(sinks=[WandB(project="gpt", mode="offline")])  # a run of its own: see wandb.init
    >>> Monitor(sinks=[WandB(wandb.run)])  # or one that is there

    `settings` are those of `wandb.init`, which also reads its environment (WANDB_MODE and so on).
    `close` finishes a run that was begun here, and leaves any other running.

    Each record is one row of the history: "fastclip/step", "fastclip/attempt", "fastclip/loss",
    "fastclip/layers/NAME/norm" and so on (`prefix` instead of "fastclip"; `layers=False` leaves the
    layers out). Charts are over "fastclip/step", which is a value: W&B drops rows whose own step
    does not increase, so it gets to number them itself, and after a rollback both attempts stay.
    For the same reason rows that you log to this run with ``step=`` may be dropped by it: log
    without, and define a step metric as well.

    "fastclip/events/critical" and so on count the events of a level so far; the summary has the
    newest event's text as "fastclip/events/newest".

    `write` hands the row to W&B's own process and does not wait for a disk or a network. What that
    process cannot write, on a full disk say, it tells its ``debug-internal.log`` alone. Offline a
    killed program loses its last rows, of at most 32 KiB.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        prefix: str = "fastclip",
        layers: bool = True,
        **settings: Any,
    ) -> None:
        if run is not None and settings:
            raise TypeError(f"WandB takes no settings for a run that is there, got {min(settings)}")
        wandb = client("WandB", "wandb", "wandb")
        self.prefix, self.layers = prefix, layers
        before = wandb.run if run is None else run  # which init may give again
        self.run = wandb.init(**settings) if run is None else run
        self._own = self.run is not before
        self._counts: Counter[str] = Counter()
        self.run.define_metric(f"{prefix}/step", hidden=True)
        self.run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Log the record as one row."""
        values = {f"{self.prefix}/step": record.step, **scalars(record, self.prefix, self.layers)}
        values.update(counts(self._counts, events, self.prefix))
        self.run.log(values)
        if events:
            self.run.summary[f"{self.prefix}/events/newest"] = sentence(events[-1])

    def close(self) -> None:
        """Finish the run if it was begun here. What W&B's process still has to write, it writes."""
        if self._own:
            self.run.finish()
