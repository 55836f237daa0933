"""Rows on their way from a device: copied without a wait, and handed out some steps later."""

import atexit
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastclip.checks import require
from fastclip.monitor.layers import Source
from fastclip.monitor.observed import Given, Later, is_tensor
from fastclip.monitor.records import StepRecord, checked

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
        self._rows: deque[tuple[int, Row]] = deque()  # and when each is due
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
        row = Row(given)
        lag = self.lag
        if lag is None:
            lag = LAG if row.devices else 0
        self._seen += 1
        self._rows.append((self._seen + lag, row))

    def due(self) -> "Row | None":
        """The next row, if its time has come; it leaves the queue."""
        if self._rows and self._rows[0][0] <= self._seen:
            return self.pop()
        return None

    def pop(self) -> "Row":
        """The next row, whether its time has come or not."""
        return self._rows.popleft()[1]

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


class Row:
    """One call of observe, with copies of its tensors under way to the host.

    The numbers of one device and dtype are gathered by one launch and copied together, other
    tensors one by one: a loss and statistics of a global threshold take two launches and three
    copies (the table; norm, coefficient and loss; two flags). Copies go into pinned memory, on the
    current stream, so whatever changes a tensor later comes after them.
    """

    def __init__(self, given: Given) -> None:
        self._fields: dict[str, Any] = {}  # on the host already
        self._numbers: list[tuple[list[str], Tensor]] = []
        self._made: list[tuple[str, Source]] = []
        self.layers: list[Source] = []  # what rows of layers are made of, once `record` was called
        self.measured = given.measured
        self.numbered = "attempt" in given.fields
        self.devices: set[torch.device] = set()  # that copies come from, but for the CPU
        groups: dict[Any, list[tuple[str, Tensor]]] = {}
        copies: dict[int, Tensor] = {}
        for name, value in given.fields.items():
            if isinstance(value, Later):
                self._made.append((name, self._begun(value, copies)))
            elif is_tensor(value):
                groups.setdefault((value.dtype, value.device), []).append((name, value))
            else:
                self._fields[name] = value
        self.layers = [self._begun(value, copies) for value in given.layers]
        for pairs in groups.values():
            self._numbers.append(([name for name, _ in pairs], self._gathered(pairs)))
        self._events = [_recorded(device) for device in self.devices]

    def record(self) -> StepRecord:
        """Wait for the copies; the record, with `attempt` 0 where none was given.

        Raises `TypeError` where a tensor held something that its field does not take.
        """
        for event in self._events:
            if event is not None:
                event.synchronize()
        read = [(name, make()) for name, make in self._made]
        for names, numbers in self._numbers:
            read.extend(zip(names, numbers.tolist(), strict=True))
        return StepRecord(**self._fields, **{name: checked(name, value) for name, value in read})

    def _gathered(self, pairs: "Sequence[tuple[str, Tensor]]") -> "Tensor":
        import torch

        numbers = [_plain(tensor) for _, tensor in pairs]
        numbers = [number.reshape(()) if number.dim() else number for number in numbers]
        return self._copied(torch.stack(numbers), new=True)

    def _begun(self, value: Later, copies: "dict[int, Tensor]") -> Source:
        for tensor in value.tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copied(_plain(tensor))
        return partial(value.make, *(copies[id(tensor)] for tensor in value.tensors))

    def _copied(self, tensor: "Tensor", new: bool = False) -> "Tensor":
        """A copy on the host, perhaps still under way. A `new` tensor is nobody else's."""
        import torch

        if tensor.is_cpu:
            return tensor if new else tensor.clone()
        self.devices.add(tensor.device)
        if not _pins(tensor.device):
            return tensor.cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _plain(tensor: "Tensor") -> "Tensor":
    """The tensor outside of any graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _recorded(device: "torch.device") -> "torch.Event | None":
    """An event behind the copies from a device; None if they were waited for."""
    import torch

    if not _pins(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _pins(device: "torch.device") -> bool:
    """Whether there is pinned memory for copies from a device: for those of the accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
