"""Time on a GPU: what the device needs for a call, and how long the call keeps the host.

The device. Before the first event the device is sent to sleep for longer than the host needs to
issue the call; so the events enclose the kernels alone, one behind the other, and not the gaps in
which an idle device waits for the host. A call that itself waits for the device is timed with that
wait. The host. The device is idle, and the clock stops when the call returns.

Where the gradients fit in the L2 cache, they would be found there after having been put back: so a
buffer of twice its size is written in between.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastclip.benchmarking.measure import Side, no_garbage_collection

CYCLES_A_US = 2000  # a GPU at 2 GHz; slower ones sleep longer
MOST_SLEEP_US = 1e6


@dataclass
class Times:
    """Microseconds of one side, one of each a round."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Clock:
    """`cuda` is `torch.cuda`, or in tests what behaves like it; `flush` empties the L2 cache."""

    def __init__(self, flush: Callable[[], object] | None, cuda: Any = torch.cuda) -> None:
        self._flush = flush
        self._cuda = cuda

    def host_us(self, side: Side) -> float:
        self._prepare(side)
        start = time.perf_counter()
        result = side.run()
        us = (time.perf_counter() - start) * 1e6
        self._judge(side, result)
        return us

    def device_us(self, side: Side, host_us: float) -> float:
        """`host_us`: what the call was seen to keep the host for."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._prepare(side)
        self._cuda._sleep(int(min(2 * host_us + 100, MOST_SLEEP_US) * CYCLES_A_US))
        start.record()
        result = side.run()
        end.record()
        self._judge(side, result)
        return float(start.elapsed_time(end)) * 1e3

    def race(self, sides: Sequence[Side], rounds: int) -> dict[str, Times]:
        """All sides in turn, odd rounds in reverse order; entry i of every list is of round i."""
        times = {side.name: Times() for side in sides}
        with no_garbage_collection():
            for index in range(rounds):
                for side in sides if index % 2 == 0 else reversed(sides):
                    host = self.host_us(side)
                    times[side.name].host.append(host)
                    times[side.name].device.append(self.device_us(side, host))
        return times

    def _prepare(self, side: Side) -> None:
        if side.before is not None:
            side.before()
        if self._flush is not None:
            self._flush()
        self._cuda.synchronize()

    def _judge(self, side: Side, result: Any) -> None:
        self._cuda.synchronize()
        if side.check is not None:
            side.check(result)
