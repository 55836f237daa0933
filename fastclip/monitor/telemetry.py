"""Rows on their way from a device: copied without a wait, and handed out some steps later."""

import atexit
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from fastclip.checks import require
from fastclip.monitor.layers import Source
from fastclip.monitor.observed import Given, Later
from fastclip.monitor.records import AS_IT_IS, NOT_NUMBERS, StepRecord, checked, unchecked

if TYPE_CHECKING:
    from torch import Event, Tensor
    from torch import device as Device

    from fastclip.monitor.monitor import Monitor

LAG = 2  # rows, where a device has numbers of them
_PLAIN = frozenset((float, int, bool))  # most values, told from tensors by one look-up


class Telemetry:
    """How long a Monitor waits for numbers from a device, and how often it takes rows of layers.

    >>> monitor = Monitor(telemetry=Telemetry(lag=2, layers_every=50))

    One Telemetry belongs to one Monitor.

    Args:
        lag: a row is handed out, as a record, exactly so many calls of `observe` after its own,
            whether it was ready before or not, so that every process does the same at the same
            step. 0: at once, which waits for the device. None: 2 for rows with a tensor that is on
            a device, 0 for others, though never before an earlier row.
        layers_every: each so many records one carries rows of layers; 0: none but those given to
            `observe`.
        layers_before: where a record has an event, so many before it are given theirs.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: one of them is negative.
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
        self._joined = False

    def join(self, monitor: "Monitor") -> None:
        """Belong to a Monitor, which is flushed when the process ends if it is still there.

        Raises `ValueError` if it belongs to one already.
        """
        if self._joined:
            raise ValueError("this Telemetry belongs to another Monitor: each needs one of its own")
        self._joined = True
        # Registered here, after its sinks were made and after all finalizers, which close files:
        # what is done at exit is done in reverse order.
        flush = partial(_flush, weakref.ref(monitor))
        weakref.finalize(monitor, atexit.unregister, flush).atexit = False
        atexit.register(flush)

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

    def __reduce__(self) -> tuple["partial[Telemetry]", tuple[()]]:
        """A copy has the settings alone: what is queued here is written by the Monitor it is of."""
        settings = {"layers_every": self.layers_every, "layers_before": self.layers_before}
        return partial(Telemetry, self.lag, **settings), ()

    def __len__(self) -> int:
        """Rows that are queued."""
        return len(self._rows)


def _flush(monitor: "weakref.ref[Monitor]") -> None:
    left = monitor()
    if left is not None:
        left.flush()


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
        self.measured = given.measured
        self.numbered = "attempt" in given.fields
        self.devices: set[Device] = set()  # that copies come from, but for the CPU
        groups: dict[Any, tuple[list[str], list[Tensor]]] = {}
        copies: dict[int, Tensor] = {}
        for name, value in given.fields.items():
            if type(value) in _PLAIN or (name in NOT_NUMBERS and type(value) is not Later):
                self._fields[name] = value
            elif type(value) is Later:
                self._made.append((name, self._begun(value, copies)))
            else:
                key = value.dtype, value.device
                if key not in groups:
                    groups[key] = [], []
                names, tensors = groups[key]
                names.append(name)
                tensors.append(value)
        # What rows of layers are made of; to be called after `record`.
        self.layers: list[Source] = [self._begun(value, copies) for value in given.layers]
        for names, tensors in groups.values():
            import torch

            self._numbers.append((names, self._copied(torch.stack(tensors), fixed=True)))
        self._events = [_recorded(device) for device in self.devices]

    def record(self) -> StepRecord:
        """Wait for the copies; the record, with `attempt` 0 where none was given.

        Raises `TypeError` where a tensor held something that its field does not take.
        """
        for event in self._events:
            if event is not None:
                event.synchronize()
        values = dict(self._fields)
        for name, make in self._made:
            values[name] = make()
        for names, numbers in self._numbers:
            for name, number in zip(names, numbers.tolist(), strict=True):
                plain = type(number) is AS_IT_IS.get(name)
                values[name] = number if plain else self._checked(name, number)
        return unchecked(values)

    def _checked(self, name: str, value: Any) -> Any:
        try:
            return checked(name, value)
        except TypeError as error:
            step = self._fields.get("step", "that is on a device")
            raise TypeError(f"{error}, in the row of the step {step}") from error

    def _begun(self, value: Later, copies: "dict[int, Tensor]") -> Source:
        own = []
        for tensor in value.tensors:
            copy = copies.get(id(tensor))
            if copy is None:
                copy = copies[id(tensor)] = self._copied(tensor, value.fixed)
            own.append(copy)
        return partial(value.make, *own)

    def _copied(self, tensor: "Tensor", fixed: bool) -> "Tensor":
        """A copy on the host, perhaps still under way; the tensor itself if it is there, and
        `fixed`: nobody changes it."""
        if tensor.is_cpu:
            return tensor if fixed else tensor.clone()
        import torch

        self.devices.add(tensor.device)
        if not _pins(tensor.device):
            return tensor.cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _recorded(device: "Device") -> "Event | None":
    """An event behind the copies from a device; None if they were waited for."""
    import torch

    if not _pins(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _pins(device: "Device") -> bool:
    """Whether there is pinned memory for copies from a device: for those of the accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
