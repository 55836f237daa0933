"""Watches on a GPU: nothing waits for it, and the numbers are those of the CPU."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from fastclip import GradClipper
from fastclip.monitor import ActivationWatch, ParameterWatch

Forbidden = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: no GPU here"
)


class Net(nn.Module):
    """One module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.shared = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shared(self.first(self.shared(self.first(x)))))


def data(step: int) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
    if step == 2:
        x[0, 0] = math.nan
    return x


def test_a_step_does_not_wait(waiting_raises: Forbidden) -> None:
    torch.manual_seed(0)
    there = Net()
    model = copy.deepcopy(there).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clipper = GradClipper(model, 1.0)
    activations, parameters = ActivationWatch(model), ParameterWatch(model, every=1)
    on_host = ActivationWatch(there)

    def step(x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model(x).square().mean().backward()
        with parameters:
            clipper.step(optimizer)
        optimizer.zero_grad()
        return activations.take(), parameters.take()

    for number in range(4):
        there.load_state_dict(model.state_dict())
        x = data(number).cuda()
        if number == 0:  # what is allocated, compiled and listed once
            seen, changed = step(x)
        else:
            with waiting_raises():
                seen, changed = step(x)
        there(data(number))
        on_host.take()
        mine, other = activations.stats().cpu(), on_host.stats()
        assert mine.names == other.names
        assert mine.nonfinite_count.equal(other.nonfinite_count)
        assert mine.max_abs.tolist() == pytest.approx(other.max_abs.tolist(), rel=1e-2)
        assert seen["activation_max"].device.type == "cuda"
        assert bool(seen["activation_max"].isnan()) == (number == 2)
        assert (float(changed["update_ratio"]) == 0) == (number == 2)
