"""Models to watch, and what their modules put out, computed plainly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip.monitor import ActivationWatch
from fastclip.monitor.watches.outputs import ActivationStats


class Returning(nn.Module):
    """Puts out what it was made with, whatever comes in."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def inputs(seed: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def outputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Of each module, of the model last."""
    found = []
    for module in model:
        x = module(x)
        found.append(x.detach().clone())
    return [*found, found[-1]]


def ended(watch: ActivationWatch) -> ActivationStats:
    assert watch.take()
    return watch.stats().cpu()


def found(watch: ActivationWatch) -> dict[str, tuple[float, int, int]]:
    """Of each module the largest magnitude, NaN and infinite elements."""
    return {row.name: (row.max_abs, row.nan, row.inf) for row in ended(watch).modules()}


def expected(*tensors: Tensor) -> tuple[float, int, int]:
    """The same of some outputs, computed plainly."""
    every = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    finite = every[every.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    return largest, int(every.isnan().sum()), int(every.isinf().sum())


class Twice(nn.Module):
    """Calls one module two times, the other when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Tanhshrink()
        self.other = nn.Identity()
        self.alias = self.shared

    def forward(self, x: Tensor, other: bool = True) -> Tensor:
        x = 2 * self.shared(x)
        return self.alias(self.other(x) if other else x)


@contextmanager
def one_of_two() -> Iterator[None]:
    """This process as one of a group of two, without the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
