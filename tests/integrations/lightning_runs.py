"""Tiny modules for Lightning, and a Trainer that runs them in silence on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fastclip.monitor import Event, StepRecord

SIZE = 6

# What Lightning itself warns of: torch's newer tree functions, loaders and runs as small as these.
SILENT = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*isinstance.treespec, LeafSpec.* is deprecated",
        "The '.*_dataloader' does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "Starting from v1.9.0, `tensorboardX` has been removed",
        "Checkpoint directory .* exists and is not empty",
        "`training_step` returned `None`",  # once in a process
        "`LightningModule.configure_optimizers` returned `None`",
        "You're resuming from a checkpoint that ended before the epoch ended",
    )
]

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Batches(Dataset[Tensor]):
    """`count` batches of 4 examples, those in `spoilt` with the value given."""

    def __init__(self, count: int, spoilt: dict[int, float] | None = None, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = torch.randn(count, 4, SIZE, generator=generator)
        for place, value in (spoilt or {}).items():
            self.batches[place, 0, 0] = value

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __getitem__(self, place: int) -> Tensor:
        return self.batches[place]


def loader(count: int, spoilt: dict[int, float] | None = None) -> DataLoader[Tensor]:
    """In order; each item is a batch already."""
    return DataLoader(Batches(count, spoilt), batch_size=None)


class Net(LightningModule):
    """Fits the sum of its input times 10: gradients of norms around 100 at the start."""

    def __init__(
        self,
        optimizer: Callable[[Any], Optimizer] | None = None,
        manual: bool = False,
        width: int = 8,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(SIZE, width), nn.Tanh(), nn.Linear(width, 1))
        self.automatic_optimization = not manual
        self.make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        target = 10 * batch.sum(1, keepdim=True)
        return (self.net(batch).float() - target.float()).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Validated(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Start(Net):
    """One layer of zeros, so what it has after one step of SGD with a rate of 1 is that step."""

    def __init__(self, kind: str, manual: bool) -> None:
        super().__init__(lambda own: torch.optim.SGD(own, lr=1.0, **KINDS[kind]), manual)
        self.net = nn.Sequential(nn.Linear(SIZE, 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Alarm:
    """Fires at one step of the monitor."""

    kind, metric = "alarm", "grad_norm"

    def __init__(self, step: int) -> None:
        self.step = step

    def init(self) -> int:
        return 0

    def __call__(self, state: int, record: StepRecord) -> tuple[int, list[Event]]:
        if record.step != self.step or record.attempt:
            return state, []
        return state, [Event(record.step, self.kind, "critical", self.metric, 1.0)]


def precise(precision: str) -> dict[str, Any]:
    """The arguments of a Trainer. It takes "16-mixed" on a CPU for "bf16-mixed", with a warning;
    the plugin does as told. Its scale is one whose gradients fit float16."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0))]}


def trainer(folder: Path, *callbacks: Any, precision: str = "32-true", **changed: Any) -> Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(callbacks=list(callbacks), **options | precise(precision) | changed)


def parameters(module: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([each.double().flatten() for each in tensors]).norm())


def moved(before: Sequence[Tensor], module: nn.Module) -> float:
    """The norm of the change, in float64."""
    pairs = zip(parameters(module), before, strict=True)
    return norm([after.double() - old.double() for after, old in pairs])
