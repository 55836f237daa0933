"""What is folded when gradients lie oddly in memory, come twice or come late."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fastclip import GradClipper, folding
from fastclip.gradients import Listed
from fastclip.policy import POLICIES, Policy
from fastclip.rules import LogZ

LAST = torch.channels_last


def conv() -> Tensor:
    return torch.ones(4, 3, 2, 2).contiguous(memory_format=LAST)


LAYOUTS: dict[str, tuple[Tensor, Tensor, bool]] = {
    "contiguous": (torch.ones(4, 3), torch.ones(4, 3), True),
    "transposed": (torch.ones(3, 4).t(), torch.ones(3, 4).t(), True),
    "channels-last": (conv(), conv(), True),
    "one-row": (torch.ones(3, 4)[:1], torch.ones(1, 4), True),
    "empty": (torch.ones(0, 4), torch.ones(0, 4), True),
    "every-second": (torch.ones(4), torch.ones(8)[::2], False),
    "both-every-second": (torch.ones(8)[::2], torch.ones(8)[::2], False),
    "gradient-transposed": (torch.ones(4, 3), torch.ones(3, 4).t(), False),
    "parameter-transposed": (torch.ones(3, 4).t(), torch.ones(4, 3), False),
    "gradient-channels-last": (torch.ones(4, 3, 2, 2), conv(), False),
    "columns": (torch.ones(4, 3), torch.ones(4, 5)[:, :3], False),
    "expanded": (torch.ones(4, 3), torch.ones(3).expand(4, 3), False),
    "sparse": (torch.ones(3), torch.ones(3).to_sparse(), False),
}


@pytest.mark.parametrize(("parameter", "grad", "expected"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_aligned(parameter: Tensor, grad: Tensor, expected: bool) -> None:
    listed = Listed([torch.ones(2), None, grad], None)
    assert folding.aligned([torch.ones(2), torch.ones(3).expand(2, 3), parameter], listed) is (
        expected
    )


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_strided_gradient_is_all_that_is_written(kind: Any) -> None:
    """torch's fused kernels for CPUs would divide its neighbours."""
    memory = torch.full((64,), 8.0)
    parameter = nn.Parameter(torch.ones(32))
    parameter.grad = memory[::2]
    stats = GradClipper([parameter], 1.0).step(kind([parameter], lr=0.1, fused=True))
    assert stats.clipped
    assert memory[1::2].tolist() == [8.0] * 32
    torch.testing.assert_close(memory[::2], torch.full((32,), 8.0 / (32 * 64 + 1e-9) ** 0.5))


def test_channels_last_is_folded() -> None:
    """Where all lies alike, the coefficient reaches every element."""
    parameter = nn.Parameter(conv())
    parameter.grad = conv()
    given: list[Any] = []
    optimizer = SGD([parameter], lr=1.0, fused=True)
    optimizer.register_step_pre_hook(lambda o, *_: given.append(vars(o).get("grad_scale")))
    GradClipper([parameter], 1.0).step(optimizer)
    assert given[0].item() == pytest.approx(48**0.5, rel=1e-6)
    torch.testing.assert_close(parameter.detach(), conv() * (1 - 48**-0.5))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("twice", [False, True], ids=["clipper-once", "clipper-twice"])
def test_a_parameter_that_a_group_lists_twice(twice: bool) -> None:
    """It is stepped twice, with a gradient that is clipped once."""
    ours, theirs = (nn.Parameter(torch.ones(2)) for _ in "ab")
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([3.0, 4.0])
    GradClipper([ours, ours] if twice else [ours], 1.0).step(SGD([ours, ours], lr=0.1, fused=True))
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    SGD([theirs, theirs], lr=0.1).step()
    torch.testing.assert_close(ours, theirs)


MOMENTUM: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "fused": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "fused-nesterov": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("optimizer", MOMENTUM.values(), ids=MOMENTUM.keys())
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gradient_that_comes_late(
    policy: Policy, optimizer: Callable[[list[Tensor]], Optimizer]
) -> None:
    """torch's fused SGD refuses missing momentum beside momentum that is there."""
    ours, theirs = ([nn.Parameter(torch.ones(2)) for _ in "ab"] for _ in "cd")
    step, reference = optimizer([*ours]), SGD(theirs, **_options(optimizer([*theirs])))
    clipper = GradClipper(ours, rule=LogZ(), nonfinite=policy)
    for number in range(3):
        for parameters in (ours, theirs):
            for late, parameter in enumerate(parameters):
                grad = torch.tensor([1.0, -2.0]) * (number + 1)
                parameter.grad = None if late > number else grad
        clipper.step(step)
        reference.step()
    torch.testing.assert_close(ours, theirs)
    assert clipper.counters()["steps"] == 3


def _options(optimizer: Optimizer) -> dict[str, Any]:
    (group,) = optimizer.param_groups
    return {name: group[name] for name in ("lr", "momentum", "nesterov")}


def test_momentum_goes_on_after_a_step_without_the_flag() -> None:
    """Under propagate a first NaN is momentum for good, as torch has it."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([math.nan])
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    GradClipper([parameter], nonfinite="propagate").step(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].isnan().all()
