"""Rows on their way from a device: copied without a wait, and handed out some steps later."""

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastclip.checks import require
from fastclip.monitor.layers import Source
from fastclip.monitor.observed import Given, Later
from fastclip.monitor.records import StepRecord, make_record

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fastclip.monitor.monitor import Monitor

LAG = 2  # rows, where a device has numbers of them


class Telemetry:
    """How long a Monitor waits for numbers from a device, and how often it takes rows of layers.

    >>> monitor = Monitor(telemetry=Telemetry(lag=2, layers_every=50))

    `lag`: a row is handed out, as a record, exactly so many calls of `observe` after its own,
    whether it was ready before or not, so that every process does the same at the same step. 0: at
    once, which waits for the device. None: 2 for rows with a tensor that is on a device, 0 for
    others, though never before an earlier row.

    `layers_every`: each so many records one carries rows of layers; 0: none but those given to
    `observe`. `layers_before`: where a record has an event, so many before it are given theirs.

    One Telemetry belongs to one Monitor.
    """

    def __init__(
        self, lag: int | None = None, *, layers_every: int = 100, layers_before: int = 10
    ) -> None:
        if lag is not None:
            _require_count("lag", lag)
        _require_count("layers_every", layers_every)
        _require_count("layers_before", layers_before)
        self.lag = lag
        self.layers_every = layers_every
        self.layers_before = layers_before
        self._rows: deque[Row] = deque()
        self._seen = 0  # rows put in
        self._monitor: weakref.ref[Monitor] | None = None

    def join(self, monitor: "Monitor") -> None:
        """Belong to a Monitor from now on. Raises `ValueError` if there is one already."""
        if self._monitor is not None:
            raise ValueError("this Telemetry belongs to another Monitor: each needs one of its own")
        self._monitor = weakref.ref(monitor)
        atexit.register(_flush, self._monitor)

    def put(self, given: Given) -> None:
        """Start the copies of a row, and queue it."""
        named = [(name, v) for name, v in given.fields.items() if isinstance(v, Later)]
        tensors = {id(t): t for _, value in named for t in value.tensors}
        tensors.update((id(t), t) for value in given.layers for t in value.tensors)
        places = {key: place for place, key in enumerate(tensors)}
        lag = self.lag
        if lag is None:
            lag = LAG if any(t.device.type != "cpu" for t in tensors.values()) else 0
        copies = Copies(list(tensors.values()))

        def awaited(value: Later) -> Callable[[], Any]:
            own, make = [places[id(t)] for t in value.tensors], value.make
            return lambda: make(*(copies.pieces()[place] for place in own))

        fields = {name: v for name, v in given.fields.items() if not isinstance(v, Later)}
        self._seen += 1
        self._rows.append(
            Row(
                self._seen + lag,
                fields,
                {name: awaited(value) for name, value in named},
                [awaited(value) for value in given.layers],
                given.measured,
            )
        )

    def due(self) -> "Row | None":
        """The next row, if its time has come; it leaves the queue."""
        if self._rows and self._rows[0].due <= self._seen:
            return self._rows.popleft()
        return None

    def pop(self) -> "Row":
        """The next row, whether its time has come or not."""
        return self._rows.popleft()

    def __len__(self) -> int:
        """Rows that are queued."""
        return len(self._rows)


def _flush(monitor: "weakref.ref[Monitor]") -> None:
    """Write what is left when the process ends."""
    found = monitor()
    if found is not None:
        found.flush()


def _require_count(name: str, value: object) -> None:
    require(name, value, "a whole number of at least 0", lambda x: x >= 0, whole=True)


class Row(NamedTuple):
    """One call of observe, which leaves at the call number `due`.

    `fields` on the host, and calls that wait for the others, `awaited`, and for what rows of layers
    are made of, `layers`. `measured`: those come from a watch.
    """

    due: int
    fields: dict[str, Any]
    awaited: dict[str, Callable[[], Any]]
    layers: Sequence[Source]
    measured: bool

    @property
    def numbered(self) -> bool:
        """Whether the attempt was given."""
        return "attempt" in self.fields or "attempt" in self.awaited

    def record(self) -> StepRecord:
        """Wait for the copies; the record, with `attempt` 0 where none was given.

        Raises `TypeError` where a tensor held something that its field does not take.
        """
        return make_record(
            {**self.fields, **{name: value() for name, value in self.awaited.items()}}
        )


class Copies:
    """Copies of tensors on the host, begun now and waited for when they are asked for.

    Per device and dtype one copy, after one launch that gathers the tensors if they are several;
    into pinned memory, on the current stream, so that what later changes a tensor comes after it.
    """

    def __init__(self, tensors: Sequence["Tensor"]) -> None:
        groups: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._groups = [_begun([tensors[place] for place in group]) for group in groups.values()]
        self._events = [_recorded(device) for device in {device for device, _ in groups}]
        self._places = [place for group in groups.values() for place in group]
        self._pieces: list[Tensor] | None = None

    def pieces(self) -> "list[Tensor]":
        """A copy of each tensor, in one dimension."""
        if self._pieces is None:
            for event in self._events:
                if event is not None:
                    event.synchronize()
            found = [piece for host, sizes in self._groups for piece in host.split(sizes)]
            by_place = dict(zip(self._places, found, strict=True))
            self._pieces = [by_place[place] for place in range(len(found))]
        return self._pieces


def _begun(tensors: "Sequence[Tensor]") -> "tuple[Tensor, list[int]]":
    """One copy of tensors of one device and dtype, not yet waited for; their sizes in it."""
    import torch

    with torch.no_grad():
        flat = [tensor.reshape(-1) for tensor in tensors]
        sizes = [len(one) for one in flat]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        if packed.device.type == "cpu":
            return packed.clone() if len(flat) == 1 else packed, sizes
        if not _pins(packed.device):
            return packed.cpu(), sizes
        host = torch.empty(len(packed), dtype=packed.dtype, device="cpu", pin_memory=True)
        return host.copy_(packed, non_blocking=True), sizes


def _recorded(device: "torch.device") -> "torch.Event | None":
    """An event behind the copies that were begun on a device."""
    import torch

    if not _pins(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _pins(device: "torch.device") -> bool:
    """Whether there is pinned memory for copies from a device: for the accelerator's."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
