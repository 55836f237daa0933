"""The sink for MLflow."""

import hashlib
import re
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from fastclip.monitor.records import Event, StepRecord
from fastclip.monitor.sinks.client import client
from fastclip.monitor.sinks.scalars import counts, scalars, sentence

BATCH = 1000  # metrics in one call: what MLflow takes at most
WAITING = 100_000  # metrics that wait for a store that fails: about 50 MB
NAME, TEXT = 120, 5000  # characters of a layer's name; of a tag: MLflow takes 250 and 8,000
_OTHER = re.compile(r"[^A-Za-z0-9_.\- ]")


class MLflow:
    """A run of MLflow, by its own client.

    >>> Monitor(sinks=[MLflow(tracking_uri="http://tracker:5000", experiment="gpt")])
    >>> Monitor(sinks=[MLflow(run_id=mlflow.active_run().info.run_id)])  # one that is there

    `tracking_uri` None is what MLflow's environment and settings say. Stores in local files
    ("file:mlruns") are there in the small package `mlflow-skinny`, and MLflow wants the environment
    variable MLFLOW_ALLOW_FILE_STORE=true for them; "sqlite:///mlflow.db" needs all of `mlflow`.
    `close` ends a run that was begun here, and leaves any other running.

    Metrics are "fastclip/loss", "fastclip/layers/NAME/norm" and so on (`prefix` instead of
    "fastclip"; `layers=False` leaves the layers out). "fastclip/events/critical" and so on count
    the events of a level so far, and the tag "fastclip.event" is the newest event's text.
    After a rollback a metric has several values at a step. All those of one record have the same
    timestamp, which no other record has, and "fastclip/attempt" is one of them.

    NAME may have letters, digits, and ``_ - .`` and space: MLflow's names are paths of files. Other
    characters become ``_``, what is beyond 120 of them is cut, and a name that this changes gets a
    ``-`` and eight hexadecimal digits of its SHA-256, so that no two layers become one. NaN and
    infinities are kept by a store of files; a database keeps the largest float for an infinity.

    Metrics are collected for `seconds` and sent together, up to 1,000 in a call; the `write` that
    sends, as one with events always does, waits for the store: files take some 0.06 ms a metric,
    0.8 ms a record without layers (benchmarks/results/sinks.csv). A killed process loses those that
    wait. If the store fails, its error is raised and they are sent again later, not before
    `seconds` are over, a few of them twice; beyond 100,000 the oldest are dropped with a
    `UserWarning`.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "fastclip",
        prefix: str = "fastclip",
        layers: bool = True,
        seconds: float = 5.0,
    ) -> None:
        mlflow = client("MLflow", "mlflow", "mlflow")
        self.prefix, self.layers, self.seconds = prefix, layers, seconds
        store = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._own = run_id is None
        self.run_id: str = _begin(store, experiment) if run_id is None else run_id
        self._waiting = _Waiting(store, self.run_id, mlflow.entities.Metric)
        # A process that ends without close sends what waits all the same.
        self._end = weakref.finalize(self, self._waiting.send)
        self._counts: Counter[str] = Counter()
        self._stamp = 0  # milliseconds, of the last record
        self._sent = time.monotonic()

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Collect the record's metrics; with events, or every `seconds`, send them."""
        values = scalars(record, self.prefix, self.layers, _allowed)
        values.update(counts(self._counts, events, self.prefix))
        self._stamp = max(int(time.time() * 1000), self._stamp + 1)
        self._waiting.add(values, self._stamp, record.step)
        if events:
            self._waiting.text = f"{self.prefix}.event", sentence(events[-1])[:TEXT]
        now = time.monotonic()
        late = now - self._sent >= self.seconds
        if late or (events and not self._waiting.failed):
            self._sent = now
            self._waiting.send()

    def close(self) -> None:
        """Send what waits, and end the run if it was begun here."""
        self._waiting.send()
        if self._own and self._end.detach():
            self._waiting.store.set_terminated(self.run_id)


class _Waiting:
    """Metrics on their way to the store."""

    def __init__(self, store: Any, run_id: str, metric: Any) -> None:
        self.store, self.run_id, self._metric = store, run_id, metric
        self.text: tuple[str, str] | None = None  # a tag to set
        self.failed = False  # the last call
        self._metrics: deque[Any] = deque()

    def add(self, values: dict[str, float], stamp: int, step: int) -> None:
        self._metrics.extend(self._metric(*item, stamp, step) for item in values.items())

    def send(self) -> None:
        try:
            self._send()
        except Exception:
            self.failed = True
            self._drop(len(self._metrics) - WAITING)
            raise
        self.failed = False

    def _send(self) -> None:
        while self._metrics:
            batch = list(islice(self._metrics, BATCH))
            self.store.log_batch(self.run_id, batch, synchronous=True)
            for _ in batch:
                self._metrics.popleft()
        if self.text:
            self.store.set_tag(self.run_id, *self.text, synchronous=True)
            self.text = None

    def _drop(self, excess: int) -> None:
        if excess <= 0:
            return
        for _ in range(excess):
            self._metrics.popleft()
        text = f"MLflow's store fails: the {excess} oldest of {WAITING + excess} metrics that wait"
        warnings.warn(f"{text} for it are dropped", UserWarning, stacklevel=4)


def _begin(store: Any, experiment: str) -> str:
    found = store.get_experiment_by_name(experiment)
    number = found.experiment_id if found else store.create_experiment(experiment)
    return str(store.create_run(number).info.run_id)


def _allowed(layer: str) -> str:
    name = _OTHER.sub("_", layer)[:NAME]
    if name == layer and name not in ("", ".", ".."):
        return name
    return f"{name}-{hashlib.sha256(layer.encode(errors='surrogatepass')).hexdigest()[:8]}"
