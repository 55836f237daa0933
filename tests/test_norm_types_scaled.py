"""Norm orders that only the reference knows, with a loss scale: powers of scaled elements overflow
or vanish where those of the unscaled ones do not."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

import fastclip
from fastclip import GradClipper
from fastclip.backends import Backend
from fastclip.testing.compare import POWER
from fastclip.testing.variants import Variant

SCALE = 2.0**16
GRADIENT = torch.tensor([0.3, 0.4])


def norm(p: float) -> float:
    return float((GRADIENT.double() ** p).sum() ** (1 / p))


@pytest.mark.parametrize("overlap", [False, True], ids=["at-the-step", "overlap"])
@pytest.mark.parametrize("p", [70.0, 200.0, -70.0, 3.0])
def test_a_step_with_a_scaler(p: float, overlap: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([parameter], lr=1.0), GradScaler("cpu", init_scale=SCALE)
    clipper = GradClipper([parameter], 0.25, norm_type=p, overlap=overlap)
    if clipper.overlap is not None:
        clipper.overlap.least = 0
    scaler.scale((parameter * GRADIENT).sum()).backward()
    stats = clipper.step(optimizer, scaler)
    assert stats.total_norm.item() == pytest.approx(norm(p), rel=1e-6)
    assert not stats.skipped
    coef = min(1.0, 0.25 / (norm(p) + 1e-6))
    torch.testing.assert_close(parameter.detach(), 1 - coef * GRADIENT, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [70.0, -70.0, 3.0, 0.5, -math.inf])
def test_power_is_that_of_the_unscaled_elements(
    p: float, variant: Variant, opened: Backend
) -> None:
    grads = [GRADIENT * SCALE, torch.zeros(0), torch.zeros(3)]
    grads = [grad.to(variant.device) for grad in grads]
    table = opened.measure(grads, p, torch.tensor(1 / SCALE, device=variant.device)).cpu()
    plain = opened.measure([grad / SCALE for grad in grads], p, None).cpu()
    assert not table.isnan().any()
    torch.testing.assert_close(table[:, POWER], plain[:, POWER], rtol=1e-12, atol=0)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("rule", [None, fastclip.rules.LogZ()], ids=["at-once", "rule"])
def test_finite_gradients_without_a_norm_are_not_stepped_with(
    rule: fastclip.rules.Rule | None, fused: bool
) -> None:
    """A loss scale of 0 makes 0 * inf of zeros, which the table counts as finite."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([parameter], lr=1.0, fused=fused), GradScaler("cpu", init_scale=0.0)
    clipper = GradClipper([parameter], rule=rule)
    scaler.scale((parameter * GRADIENT).sum()).backward()
    stats = clipper.step(optimizer, scaler)
    assert stats.total_norm.isnan()
    assert (stats.skipped.item(), stats.found_inf.item()) == (True, 1.0)
    assert parameter.tolist() == [1.0, 1.0]
    assert clipper.counters()["skipped"] == 1
