"""The sink for TensorBoard."""

import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastclip.monitor.records import Event, StepRecord
from fastclip.monitor.sinks.client import client
from fastclip.monitor.sinks.scalars import counts, scalars, sentence

QUEUE = 1000  # records on their way to the file; TensorBoard's own default, 20, is 20 steps
SECONDS = 10  # between two writes to a file system that cannot append


class TensorBoard:
    """Event files for TensorBoard, written by its own writer; needs `tensorboard`, not torch.

    >>> Monitor(sinks=[TensorBoard("runs/one")])  # then: tensorboard --logdir runs

    Scalars are named "fastclip/loss", "fastclip/layers/NAME/norm" and so on (`prefix` instead of
    "fastclip"; `layers=False` leaves the layers out). Events are text under "fastclip/events", and
    "fastclip/events/critical" and so on count those of a level so far.

    TensorBoard hides the points of a run that lie at or after a step that comes again. So what
    comes after a rollback is a run of its own: attempt 0 is in `logdir`, attempt n in the folder
    ``attempt-n`` in it. The attempt is the record's; where a process goes on with a run, it is
    right if the Monitor has its state or a `JSONL` sink.

    Numbers become float32: what is too large is an infinity. The page shows 1,000 points of each
    name unless told ``--samples_per_plugin scalars=0``; the files have them all.

    A writing thread does the work: `write` waits for it if 1,000 records are queued, or if there
    are events. A killed process loses what is queued, and up to 10 seconds where the folder is not
    on a disk ("gs://"). An error of the thread, such as a full disk, is raised by the next `write`,
    by every one after it, and by `close`.
    """

    def __init__(
        self, logdir: str | os.PathLike[str], *, prefix: str = "fastclip", layers: bool = True
    ) -> None:
        self.logdir, self.prefix, self.layers = Path(logdir).absolute(), prefix, layers
        need = "TensorBoard", "tensorboard"
        self._writers = client(*need, "tensorboard.summary.writer.event_file_writer")
        self._point = client(*need, "tensorboard.compat.proto.event_pb2").Event
        self._text = client(*need, "tensorboard.plugins.text.summary_v2").text_pb
        self._counts: Counter[str] = Counter()
        self._attempt: int | None = None
        self._writer: Any = None

    def write(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Queue the record; with events, write to the file all that is queued."""
        point = self._point(wall_time=time.time(), step=record.step)
        values = scalars(record, self.prefix, self.layers)
        values.update(counts(self._counts, events, self.prefix))
        for name, value in values.items():
            point.summary.value.add(tag=name, simple_value=value)
        if events:
            # Markdown shows what is indented as it is: a layer called __x__ is not bold.
            text = "\n".join(f"    {sentence(event)}" for event in events)
            point.summary.value.extend(self._text(f"{self.prefix}/events", text).value)
        if self._writer is None or record.attempt != self._attempt:
            self._open(record.attempt)
        self._writer.add_event(point)
        if events:
            self._writer.flush()

    def close(self) -> None:
        """Write what is queued, and close the file; a later `write` begins another."""
        if self._writer is not None:
            self._writer = None
            self._end()

    def _open(self, attempt: int) -> None:
        self.close()
        folder = self.logdir / f"attempt-{attempt}" if attempt else self.logdir
        self._writer = self._writers.EventFileWriter(
            str(folder), max_queue_size=QUEUE, flush_secs=SECONDS
        )
        self._attempt = attempt
        # The writer's thread ends with the process, its queue unwritten; this comes before.
        self._end = weakref.finalize(self, _finish, self._writer)


def _finish(writer: Any) -> None:
    try:
        writer.flush()  # which raises the thread's error; close does not
    finally:
        writer.close()
