"""What a fused optimizer is told: to divide only if there is something to divide by."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import fastclip
from tests.making import floats


@pytest.mark.parametrize(
    ("max_norm", "users", "expected"),
    [
        (10.0, None, None),
        (2.5, None, 2.0),
        (10.0, 4.0, 4.0),
    ],
)
def test_a_division_by_1_is_not_asked_for(
    max_norm: float, users: float | None, expected: float | None
) -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = floats(3.0, 4.0)
    optimizer = AdamW([parameter], fused=True)
    if users is not None:
        setattr(optimizer, "grad_scale", torch.tensor(users))  # noqa: B010
    seen: list[Tensor | None] = []

    def note(*call: Any) -> None:
        seen.append(vars(optimizer)["grad_scale"])

    optimizer.register_step_pre_hook(note)
    fastclip.GradClipper([parameter], max_norm).step(optimizer)
    (given,) = seen
    if expected is None:
        assert given is None
        assert torch.equal(parameter.grad, floats(3.0, 4.0))
    else:
        assert given is not None
        assert float(given) == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(parameter.grad, floats(3.0, 4.0) / expected)
