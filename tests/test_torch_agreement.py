"""Equal to torch.nn.utils wherever torch is right.

torch rounds the norm, the sum with 1e-6 and the quotient to the gradients' own dtype before it
multiplies; fastclip rounds the float64 coefficient once. So the comparison within 1 ulp is torch in
float64, rounded to the gradient's dtype. torch in the gradient's own dtype differs from that by its
own roundings: norm, sum, quotient and product, half an ulp each, twice that at worst where a value
sits just below a power of two: 4 ulp in every dtype.
"""

import math

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip.testing.cases import GPT2_MINI
from tests.making import grads_of, parameters, snapshot

REALS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def ulps_apart(a: Tensor, b: Tensor) -> int:
    """How many representable numbers lie between the two, at worst."""
    steps = []
    for x in (a, b):
        bits = x.contiguous().view(INTEGER[x.element_size()]).to(torch.int64)
        lowest = -(2 ** (8 * x.element_size() - 1))
        steps.append(torch.where(bits < 0, lowest - bits, bits))
    return int((steps[0] - steps[1]).abs().max()) if a.numel() else 0


def _lists(dtype: torch.dtype) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return {
        "small": [normal(20, 3), normal(7)],
        "gpt2-mini": [normal(*shape, scale=0.02) for shape in GPT2_MINI[:30]],
        "transposed": [normal(50, 30).t(), normal(99)[::2]],
        "few-large": [normal(1000), normal(3, scale=50)],
    }


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("name", ["small", "gpt2-mini", "transposed", "few-large"])
@pytest.mark.parametrize("share", [0.1, 0.77, 2.0])
@pytest.mark.usefixtures("each_backend")
def test_within_one_ulp_of_torch_in_float64(
    name: str, dtype: torch.dtype, p: float, share: float
) -> None:
    grads = _lists(dtype)[name]
    wide = parameters(*(g.to(torch.float64, copy=True) for g in grads))
    max_norm = share * float(torch.nn.utils.get_total_norm(grads_of(wide), p))
    expected = torch.nn.utils.clip_grad_norm_(wide, max_norm, p)
    ours = parameters(*(g.clone() for g in grads))
    norm = fastclip.clip_grad_norm_(ours, max_norm, p)
    assert norm.double().item() == pytest.approx(expected.item(), rel=1e-6)
    # float64 against float64: two sums of up to 40,000 terms, neither rounded once: 27 measured
    allowed = 64 if dtype == torch.float64 else 1
    for a, b in zip(grads_of(ours), grads_of(wide), strict=True):
        assert ulps_apart(a, b.to(dtype)) <= allowed


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("name", ["small", "transposed", "few-large"])
@pytest.mark.usefixtures("each_backend")
def test_within_four_ulp_of_torch_itself(name: str, dtype: torch.dtype) -> None:
    grads = _lists(dtype)[name]
    ours, theirs = (parameters(*(g.clone() for g in grads)) for _ in range(2))
    norm = fastclip.clip_grad_norm_(ours, 1.0)
    torch_norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert norm.item() == pytest.approx(torch_norm.item(), rel=4 * torch.finfo(dtype).eps)
    for a, b in zip(grads_of(ours), grads_of(theirs), strict=True):
        assert ulps_apart(a, b) <= 4


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.usefixtures("each_backend")
def test_exactly_torch_where_nothing_is_clipped(dtype: torch.dtype) -> None:
    grads = _lists(dtype)["small"]
    ours, theirs = (parameters(*snapshot(grads)) for _ in range(2))
    fastclip.clip_grad_norm_(ours, 100.0)
    torch.nn.utils.clip_grad_norm_(theirs, 100.0)
    for a, b in zip(grads_of(ours), grads_of(theirs), strict=True):
        assert ulps_apart(a, b) == 0


@pytest.mark.parametrize(
    "function",
    ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"],
)
def test_the_signature_is_torchs(function: str) -> None:
    import inspect

    ours = inspect.signature(getattr(fastclip, function)).parameters
    theirs = inspect.signature(getattr(torch.nn.utils, function)).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


def test_training_is_the_same() -> None:
    """Twenty SGD steps of a small network, clipped on most of them."""

    def losses(clip: object) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(64, 8), torch.randn(64, 1)
        seen = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            clip(model.parameters(), 0.2)  # type: ignore[operator]
            optimizer.step()
            seen.append(loss.item())
        return seen

    ours, theirs = losses(fastclip.clip_grad_norm_), losses(torch.nn.utils.clip_grad_norm_)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0]
