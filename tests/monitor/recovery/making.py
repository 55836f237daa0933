"""Small runs with checkpoints, for the tests."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import GradClipper
from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy
from fastclip.monitor.detectors import NonFinite


def event(step: int, onset: int | None = None, level: Any = "critical") -> Event:
    return Event(step, "made", level, "loss", 1.0, onset=onset, message="made by a test")


class Tally:
    """The least state: what batches it was given, in order."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = list(state["batches"])


def tallied(
    recovery: Recovery,
    tally: Tally,
    stop: int,
    events: Callable[[int, int], Collection[Event]] = lambda step, batch: (),
) -> Iterator[tuple[int, int]]:
    """Run, and give each step and its batch once it has been handled."""
    for step, batch in recovery.steps(stop):
        tally.batches.append(batch)
        recovery.handle(events(step, batch))
        yield step, batch


class Run:
    """Training with everything that has state: dropout, buffers, moments, a schedule, a rule."""

    def __init__(
        self,
        folder: Path,
        policy: RollbackPolicy | None = None,
        *,
        poisoned: Collection[int] = (),
        every: int = 5,
        keep: int = 3,
        asynchronous: bool = False,
        width: int = 8,
    ) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [12, 20])
        self.clipper = GradClipper(self.model, max_norm=1.0, nonfinite="propagate")
        self.monitor = Monitor([NonFinite()])
        self.poisoned = poisoned
        self.used: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.recovery = Recovery(
            folder,
            self.state(),
            policy or RollbackPolicy(confirm=4, lr_steps=6),
            every=every,
            keep=keep,
            asynchronous=asynchronous,
        )

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "clipper", "monitor")
        return {name: getattr(self, name) for name in names}

    def inputs(self, batch: int) -> Tensor:
        made = torch.randn(16, 4, generator=torch.Generator().manual_seed(batch))
        return made * float("nan") if batch in self.poisoned else made

    def body(self, step: int, batch: int) -> Tensor:
        inputs = self.inputs(batch)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.stats = self.clipper.step(self.optimizer)
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def advance(self, stop: int) -> "Run":
        for step, batch in self.recovery.steps(stop):
            self.used.append((step, batch))
            loss = self.body(step, batch)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            found = self.monitor.observe(step=step, loss=loss, stats=self.stats, batch=batch)
            self.recovery.handle(found)
        return self

    def bits(self) -> dict[str, list[Any]]:
        """Parameters, buffers and moments, exactly."""
        moments = self.optimizer.state_dict()["state"]
        values = {name: value.tolist() for name, value in self.model.state_dict().items()}
        for index, state in moments.items():
            values |= {f"{index}/{name}": value.tolist() for name, value in state.items()}
        return values
