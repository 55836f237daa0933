"""A small model under DistributedDataParallel, for the tests of attribution."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unmarked
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastclip.distributed import Attribution, attribution_hook

WIDTH = 6
EACH = 1e-5  # of bucket_cap_mb: a bucket for each parameter

LAYOUTS: dict[str, dict[str, Any]] = {
    "one-bucket": {},
    "bucket-each": {"bucket_cap_mb": EACH},
    "views": {"bucket_cap_mb": EACH, "gradient_as_bucket_view": True},
    "unused": {"bucket_cap_mb": EACH, "find_unused_parameters": True},
    "unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": EACH, "static_graph": True},
    "static-views": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Layers(nn.Module):
    """Three linear layers, of which the second may be left out."""

    def __init__(self, rare: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, dtype=dtype)
        self.rare = nn.Linear(16, 16, dtype=dtype)
        self.last = nn.Linear(16, 3, dtype=dtype)
        self._rare = rare

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(self.rare(x).relu() if self._rare else x)


def layers(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    """The same parameters on every rank. Where DDP looks for unused ones, rank 0 alone uses all."""
    torch.manual_seed(0)
    rare = dist.get_rank() == 0 or not options.get("find_unused_parameters", False)
    return DistributedDataParallel(Layers(rare, dtype), **options)


def hooked(
    options: dict[str, Any], dtype: torch.dtype = torch.float32, **named: Any
) -> tuple[DistributedDataParallel, Attribution]:
    model = layers(options, dtype)
    attribution = Attribution(model, **named)
    model.register_comm_hook(attribution, attribution_hook)
    return model, attribution


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Another one on every rank and in every step."""
    generator = torch.Generator().manual_seed(1 + step + 1000 * dist.get_rank())
    return torch.randn(5, WIDTH, generator=generator).to(dtype)


def backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().sum().backward()


def own_gradients(model: DistributedDataParallel, *inputs: Tensor) -> dict[str, Tensor]:
    """What this rank's backward gives alone, in float64; zeros where it gives nothing."""
    twin = copy.deepcopy(model.module)
    twin.zero_grad()
    for each in inputs:
        backward(twin, each)
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double()
        for name, p in twin.named_parameters()
    }


def sgd_steps(model: nn.Module, steps: int, rate: float = 0.01) -> Iterator[int]:
    """Train between the numbers it yields, at each of which a backward is due."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        yield step
        optimizer.step()


def counting(counts: list[int], bucket: GradBucket) -> Future[Tensor]:
    """A hook that averages, and counts the buckets of each step."""
    if bucket.index() == 0:
        counts.append(0)
    counts[-1] += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
