"""A pool of processes that form process groups and run functions for the tests.

>>> with Pool(4) as pool:
...     answers = pool.run(2, job, argument, seconds=10)  # one answer per rank

A job is a function at the top of a module; every rank calls it with the same arguments, inside a
process group of its own that is gone afterwards. The processes stay: to import torch takes seconds.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

BEGIN = 60.0  # seconds that a process may take to start: it waits for imports
SLICE = 0.5  # seconds between two looks at the clock
GRACE = 5.0  # that others have when a rank has raised: they may be waiting for it
TIMEOUT = 30.0  # of the process groups; a busy machine takes its time
# Runs after which the processes are replaced: of many a group that is gone a thread of gloo stays,
# which wakes a hundred times a second. 172 tests took 37 s with this and 49 s without.
LIFE = 50

_PRELOAD = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch.distributed.tensor.debug", "torch.optim.adamw", "hypothesis", "pytest"),
]


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not answer; the message has each one's traceback."""


class Request(NamedTuple):
    """What a rank is asked to do."""

    size: int
    job: str  # module:name
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    store: str
    timeout: float


class Answer(NamedTuple):
    """What became of it: the value, or in words why there is none."""

    value: Any
    fault: str


class Pool:
    """`most` processes, of which the first `size` take part in a run."""

    def __init__(self, most: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastclip-ranks-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._most = most
        self._runs = 0
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def run(
        self,
        size: int,
        job: Callable[..., Any],
        *arguments: Any,
        seconds: float = 60.0,
        timeout: float = TIMEOUT,
        dying: Collection[int] = (),
        **named: Any,
    ) -> list[Any]:
        """What `job` returned on each of the ranks 0 to `size` - 1.

        Raises `RanksFailed` if a rank raised, died, or gave no answer within `seconds`; after the
        last two the processes are replaced by new ones. `timeout`, in seconds, is that of the
        process group. Ranks in `dying` must die: they have None in the place of an answer.
        """
        __tracebackhide__ = True
        if self._runs % LIFE == 0:
            self.stop()
        if not self._processes:
            self._start()
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        place = f"{job.__module__}:{job.__qualname__}"
        request = Request(size, place, arguments, named, store, timeout)
        for connection in self._connections[:size]:
            connection.send_bytes(pickle.dumps(request))
        answers = self._answers(size, seconds)
        dead = {rank for rank in range(size) if not self._processes[rank].is_alive()}
        faults = [f"rank {rank} {answer.fault}" for rank, answer in answers.items() if answer.fault]
        hanging = sorted(set(range(size)) - answers.keys() - dead)
        faults += [f"rank {rank} {self._ended(rank)}" for rank in sorted(dead - set(dying))]
        faults += [f"rank {rank} was to die and did not" for rank in sorted(set(dying) - dead)]
        within = f"{GRACE:g} s after that" if faults else f"{seconds:g} s"
        faults += [f"rank {rank} {self._hangs(rank, within)}" for rank in hanging]
        if dead or hanging:
            self.stop()
        else:  # nobody leaves the group while another may still be reading from it
            for connection in self._connections[:size]:
                connection.send_bytes(b"leave")
        if faults:
            raise RanksFailed(f"{place} on {size} ranks:\n" + "\n".join(faults))
        return [answers[rank].value if rank in answers else None for rank in range(size)]

    def stop(self) -> None:
        """End the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        for rank in range(self._most):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(theirs, rank, str(self._stack(rank))),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(BEGIN) or connection.recv_bytes() != b"ready":
                self.stop()
                raise RanksFailed(f"rank {rank} did not start within {BEGIN:g} s")

    def _answers(self, size: int, seconds: float) -> dict[int, Answer]:
        """What has come after `seconds` at most, of which those do not count in which this process
        was stopped."""
        waiting: dict[Any, int] = {self._connections[rank]: rank for rank in range(size)}
        answers: dict[int, Answer] = {}
        while waiting:
            begun = time.monotonic()
            ready = wait(list(waiting), SLICE)
            if not ready and seconds <= 0:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:  # it has died, which the caller looks at
                    self._processes[rank].join()
                    continue
                if answers[rank].fault:
                    seconds = min(seconds, GRACE)
            seconds -= min(time.monotonic() - begun, 2 * SLICE)
        return answers

    def _ended(self, rank: int) -> str:
        return f"died with exit status {self._processes[rank].exitcode}"

    def _hangs(self, rank: int, within: str) -> str:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        stack, deadline = self._stack(rank), time.monotonic() + 1
        while stack.stat().st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"gave no answer in {within}; it is at\n{stack.read_text()}"

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack-{rank}"


def _serve(connection: Connection, rank: int, stack: str) -> None:
    """What a process of the pool does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest is told to
    with Path(stack).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        connection.send_bytes(b"ready")
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:  # the pool is gone
                return
            if message != b"leave":
                connection.send_bytes(_packed(rank, pickle.loads(message)))
            elif dist.is_initialized():
                dist.destroy_process_group()


def _packed(rank: int, request: Request) -> bytes:
    try:
        return pickle.dumps(Answer(_call(rank, request), ""))
    except Exception:
        return pickle.dumps(Answer(None, f"raised\n{traceback.format_exc()}"))


def _call(rank: int, request: Request) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    store = dist.FileStore(request.store, request.size)  # type: ignore[attr-defined]  # torch does not export it
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=request.size,
        timeout=timedelta(seconds=request.timeout),
    )
    # A rank that is in while another still connects to it must not die yet: that one's error would
    # speak of its connection, and of no job.
    store.set(f"in {rank}", "")
    store.wait([f"in {other}" for other in range(request.size)])
    module, name = request.job.split(":")
    return getattr(import_module(module), name)(*request.arguments, **request.named)
