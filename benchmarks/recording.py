"""One recording of rows: the command line and the suite under pytest share it."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import machine, memory, report, workloads
from fastclip.benchmarking.contest import FULL, QUICK, Row
from fastclip.benchmarking.memory import MemoryResult
from fastclip.benchmarking.runner import Result, run

Say = Callable[[str], None]


class Recording:
    """Takes rows one after the other, says each as it is there, and keeps them all.

    After `seconds` (None: never) no further row is begun: `over` gives the reason.
    """

    def __init__(
        self,
        say: Say,
        *,
        quick: bool = False,
        threads: int = 2,
        backend: str | None = None,
        seconds: float | None = None,
    ) -> None:
        self.results: dict[str, Result | MemoryResult] = {}
        self._say, self._quick, self._backend_asked = say, quick, backend
        self._threads = threads
        torch.set_num_threads(threads)
        self._machine = machine.describe()
        self._backend = _backend()
        others = machine.Others()
        time.sleep(0.5)
        self._before = others.idleness()
        self._introduce()
        self._others = machine.Others()
        self._end = None if seconds is None else time.monotonic() + seconds
        self._seconds = seconds

    def over(self) -> str | None:
        """Why no further row is begun, or None."""
        late = self._end is not None and time.monotonic() > self._end
        return f"left out, {self._seconds:g} s are over" if late else None

    def why_not(self, row: Row) -> str | None:
        """Why this row is not begun, or None: time is over, or memory too small for its gradients
        and the probes."""
        size = QUICK if self._quick else FULL
        if reason := self.over():
            return reason
        available = machine.available_bytes()
        if not row.workload or available is None:
            return None
        shapes = size.shapes(row.workload)
        needed = row.copies * workloads.n_bytes(shapes, row.dtype) + 2 * size.probe_bytes
        if needed <= available:
            return None
        return f"left out, it needs {needed / 2**30:.1f} GiB of {available / 2**30:.1f} available"

    def race(self, row: Row) -> Result:
        """Measured once, however often it is asked for."""
        if row.name not in self.results:
            # Targets are for full sizes: a small one measured against them would only mislead.
            quick = replace(row, at_least=None)
            self._keep(run(quick, QUICK) if self._quick else run(row, FULL))
        result = self.results[row.name]
        assert isinstance(result, Result)
        return result

    def memory(self, dtype: str) -> MemoryResult:
        arguments = dtype, self._threads, self._backend_asked, self._quick
        result = memory.run_in_child(*arguments)
        self._keep(result)
        return result

    def finish(self) -> report.Run:
        results = list(self.results.values())
        self._say(report.footing(results))
        during = self._others.idleness()
        self._warn(during)
        return report.Run(self._machine, *self._backend, self._before, during, results)

    def _keep(self, result: Result | MemoryResult) -> None:
        self.results[result.name] = result
        self._say("\n".join([report.line(result), *report.peer_lines(result)]))

    def _introduce(self) -> None:
        if self._threads > self._machine.cores:
            self._say(f"warning: {self._threads} threads on {self._machine.cores} cores")
        self._warn(self._before)
        if self._quick:
            self._say(
                "quick: small sizes and few rounds prove that it runs; no ratio means a thing"
            )
        self._say(report.heading(self._machine, *self._backend))

    def _warn(self, idle: machine.Idleness) -> None:
        if complaint := idle.complaint():
            self._say(f"warning: {complaint}; load average {idle.load_average:.2f}")


def _backend() -> tuple[str, str]:
    """The backend's name, and what runs under it."""
    name = backends.choose(torch.device("cpu")).name
    return name, f"C++ ({native.simd()})" if name == "cpu" else "plain PyTorch"
