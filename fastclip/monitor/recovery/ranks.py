"""The ranks of a run: what one of them cannot do, none of them has done."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


class Ranks:
    """All processes of the default group, or this one alone.

    Exchanges are made over a gloo group of its own, so that a checkpoint may be written while the
    run's own exchanges go on.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

    def gather(self, what: str, job: Callable[[], Value]) -> list[Value]:
        """What `job()` gave on each rank. An error on one is an error on all: on its own rank as it
        was, elsewhere a `RuntimeError` that says `what` failed, and where.
        """
        if self._group is None:
            return [job()]
        value, error = None, None
        try:
            value = job()
        except Exception as raised:
            error = raised
        fault = None if error is None else f"{type(error).__name__}: {error}"
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (value, fault), group=self._group)
        if error is not None:
            raise error
        for rank, (_, fault) in enumerate(outcomes):
            if fault is not None:
                raise RuntimeError(f"rank {rank} failed {what}: {fault}")
        return [value for value, _ in outcomes]

    def each(self, what: str, job: Callable[[], Value]) -> Value:
        """What `job()` gave on this rank, once it has given something on all."""
        mine: list[Value] = []
        self.gather(what, lambda: mine.append(job()))
        return mine[0]

    def first(self, what: str, job: Callable[[], Value]) -> Value:
        """Let rank 0 do it alone; what it gave, on all."""
        values = self.gather(what, lambda: job() if self.rank == 0 else None)
        return values[0]  # type: ignore[return-value]
