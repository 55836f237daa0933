"""Jobs of ranks that recover: sharded and replicated training with a poisoned batch."""

import math
import os
import random
import signal
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastclip import GradClipper
from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy, StepRecord, Telemetry
from fastclip.monitor.detectors import NonFinite
from fastclip.monitor.recovery.checkpoints import _Writer
from tests.distributed import layouts, models

Poison = tuple[int, int] | None  # the rank and the number of the batch that is NaN


class Run:
    """One rank's share of a run; `layout` is "fsdp", "ddp" or "mixed" (a part sharded)."""

    def __init__(
        self,
        folder: str,
        layout: str,
        poison: Poison = None,
        blaming: bool = False,
        asynchronous: bool = False,
    ) -> None:
        self.rank, self.size, self.poison = dist.get_rank(), dist.get_world_size(), poison
        torch.manual_seed(7 + self.rank)
        random.seed(self.rank)
        self.model: nn.Module = models.net()
        if layout == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            mesh = init_device_mesh("cpu", (self.size,), mesh_dim_names=("data",))
            inner = self.model if layout == "fsdp" else self.model.get_submodule("first")
            fully_shard(inner, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.clipper = GradClipper(self.model, max_norm=1.0, nonfinite="propagate")
        self.monitor = Monitor([NonFinite()])
        self.used: list[tuple[int, int]] = []
        self.losses: dict[int, list[float]] = {}  # of each step, every rank's own
        self.recovery = Recovery(
            folder,
            {name: getattr(self, name) for name in ("model", "optimizer", "clipper", "monitor")},
            RollbackPolicy(confirm=2, lr_steps=3, ranks=self.guilty if blaming else None),
            every=3,
            asynchronous=asynchronous,
        )

    def body(self, step: int, batch: int) -> Tensor:
        self.used.append((step, batch))
        loss = layouts.loss(self.model, models.part(batch, self.rank, self.size))
        loss = loss * (1 + 0.1 * torch.rand(1) + 0.1 * random.random())
        if (self.rank, batch) == self.poison:
            loss = loss * float("nan")
        loss.backward()
        self.averaged()
        self.stats = self.clipper.step(self.optimizer)
        self.optimizer.zero_grad()
        losses = [torch.empty_like(loss) for _ in range(self.size)]
        dist.all_gather(losses, loss.detach())
        self.losses[step] = [each.item() for each in losses]
        return torch.stack(losses).mean()

    def guilty(self, event: Event) -> list[int]:
        """The ranks whose own loss was not finite where the fault began."""
        assert event.onset is not None
        losses = self.losses[event.onset]
        return [rank for rank, each in enumerate(losses) if not math.isfinite(each)]

    def averaged(self) -> None:
        """Gradients that nobody else reduces: those of "mixed" outside of the shards."""
        if isinstance(self.model, DistributedDataParallel):
            return
        for each in self.model.parameters():
            if not isinstance(each, DTensor) and each.grad is not None:
                dist.all_reduce(each.grad)
                each.grad /= self.size

    def advance(self, stop: int) -> "Run":
        for step, batch in self.recovery.steps(stop):
            loss = self.body(step, batch)
            found = self.monitor.observe(step=step, loss=loss, stats=self.stats)
            self.recovery.handle(found)
        return self

    def outcome(self) -> dict[str, Any]:
        full = {}
        for name, value in self.model.state_dict().items():
            full[name] = (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        recovery = self.recovery
        return {
            "model": full,
            "rollbacks": [tuple(rollback) for rollback in recovery.rollbacks],
            "skipped": recovery.skipped,
            "used": self.used,
            "random": (torch.rand(1).item(), random.random()),
            "checkpoints": [tuple(each)[::2] for each in recovery.checkpoints],
        }


def trained(folder: str, layout: str, stop: int, **options: Any) -> dict[str, Any]:
    return Run(folder, layout, **options).advance(stop).outcome()


def dying_in_a_save(folder: str, stop: int) -> None:
    """Rank 1 is gone before it has written its part of the checkpoint of step 6."""
    run = Run(folder, "fsdp")
    for step, batch in run.recovery.steps(stop):
        run.body(step, batch)
        if step == 5 and run.rank == 1:
            _Writer.write_data = _die  # type: ignore[method-assign,assignment]


def failing_to_write(folder: str) -> list[str]:
    """Only rank 1 cannot write; both say so."""
    run = Run(folder, "fsdp")
    said = []
    for _ in range(2):
        with patch.object(_Writer, "write_data", _full if run.rank else _Writer.write_data):
            try:
                run.advance(1)
            except OSError as error:
                said.append(str(error))
    return said


def refusing_to_save(folder: str) -> str:
    """The state of rank 1 has something that cannot be saved."""
    run = Run(folder, "fsdp")
    if run.rank == 1:
        run.monitor.state_dict = lambda: {"seen": {1, 2}}  # type: ignore[method-assign]
    try:
        run.advance(1)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_to_write_a_record(folder: str) -> str:
    """The sink of rank 0 fails at a record that is still on its way when a checkpoint is due."""
    run = Run(folder, "fsdp")

    class Full:
        def write(self, record: StepRecord, events: list[Event]) -> None:
            raise OSError("no space left for the log")

    sinks = [Full()] if run.rank == 0 else []
    run.monitor = Monitor([NonFinite()], sinks, telemetry=Telemetry(5))
    state: dict[str, Any] = {"model": run.model, "monitor": run.monitor}
    run.recovery = Recovery(folder, state, RollbackPolicy(confirm=2), every=3)
    try:
        run.advance(9)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def replayed(folder: str, spoil: bool) -> tuple[Any, ...]:
    """Steps 3 and 4 twice; with `spoil`, rank 1 sees another loss the second time."""
    run = Run(folder, "fsdp").advance(5)
    calls = []

    def body(step: int, batch: int) -> Tensor:
        calls.append(step)
        loss = run.body(step, batch)
        return loss + (spoil and run.rank == 1 and len(calls) == 4)

    before = run.outcome()
    found = run.recovery.replay(4, body)
    run.used = before["used"]
    assert run.outcome()["model"] == before["model"]
    return tuple(found)
