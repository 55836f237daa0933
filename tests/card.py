"""A CPU that plays a GPU: what `benchmarks.gpu_session.Card` asks of `torch.cuda`."""

import time
from typing import Any


class Event:
    def __init__(self, card: "FakeCuda") -> None:
        self._card = card
        self.at = 0.0

    def record(self) -> None:
        self._card.log.append("record")
        self.at = self._card.clock()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return 1e3 * (end.at - self.at)


class FakeCuda:
    """`log` says what was asked for, in order; the clock is that of the CPU, or a given one."""

    L2_cache_size = 1 << 20

    def __init__(self, clock: Any = time.perf_counter) -> None:
        self.clock = clock
        self.log: list[str] = []

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.log.append(f"sleep {cycles}")

    def get_device_properties(self, device: int) -> "FakeCuda":
        return self

    def mem_get_info(self) -> tuple[int, int]:
        return 4 << 30, 8 << 30

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def memory_allocated(self) -> int:
        return 1000

    def max_memory_allocated(self) -> int:
        return 1512

    def empty_cache(self) -> None:
        self.log.append("empty")
