"""clip_grad_value_: as torch, and what torch leaves undefined."""

import math

import pytest
import torch

import fastclip
from tests.making import floats, grads_of, parameters

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_as_torch(dtype: torch.dtype) -> None:
    grads = [
        torch.randn(300).to(dtype),
        torch.randn(7, 5).t().to(dtype),
        torch.zeros(0, dtype=dtype),
    ]
    ours, theirs = (parameters(*(g.clone() for g in grads)) for _ in range(2))
    fastclip.clip_grad_value_(ours, 0.7)
    torch.nn.utils.clip_grad_value_(theirs, 0.7)
    for a, b in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_special_values() -> None:
    params = parameters(floats(NAN, INF, -INF, -0.0, 0.5, 2.0, -2.0))
    fastclip.clip_grad_value_(params, 1.0)
    got = grads_of(params)[0].tolist()
    assert math.isnan(got[0])
    assert got[1:] == [1.0, -1.0, 0.0, 0.5, 1.0, -1.0]
    assert math.copysign(1, got[3]) == -1


@pytest.mark.parametrize(("clip_value", "expected"), [(0.0, [0.0, 0.0]), (INF, [3.0, -4.0])])
def test_zero_and_infinity(clip_value: float, expected: list[float]) -> None:
    params = parameters(floats(3.0, -4.0))
    fastclip.clip_grad_value_(params, clip_value)
    assert grads_of(params)[0].tolist() == expected


def test_every_kind_of_parameters() -> None:
    module = torch.nn.Linear(2, 1)
    for given in (
        module,
        module.parameters(),
        list(module.parameters()),
        module.named_parameters(),
    ):
        for param in module.parameters():
            param.grad = torch.full_like(param, 9.0)
        fastclip.clip_grad_value_(given, 0.25)
        assert all(bool((p.grad == 0.25).all()) for p in module.parameters() if p.grad is not None)


def test_no_gradients_is_no_error() -> None:
    fastclip.clip_grad_value_([], 1.0)  # torch: RuntimeError
    fastclip.clip_grad_value_(parameters(None), 1.0)


def test_a_sparse_gradient_by_its_coalesced_values() -> None:
    indices = torch.tensor([[1, 1, 4]])
    grad = torch.sparse_coo_tensor(indices, floats(0.6, 0.6, -3.0), (6,), check_invariants=True)
    params = parameters(grad)
    fastclip.clip_grad_value_(params, 1.0)
    assert params[0].grad is grad
    assert grad.to_dense().tolist() == [0.0, 1.0, 0.0, 0.0, -1.0, 0.0]


def test_an_expanded_gradient() -> None:
    storage = floats(3.0)
    fastclip.clip_grad_value_(parameters(storage.expand(4, 5)), 1.0)
    assert storage.item() == 1.0


def test_mixed_dtypes() -> None:
    params = parameters(
        floats(3.0), floats(3.0, dtype=torch.float64), floats(3.0, dtype=torch.half)
    )
    fastclip.clip_grad_value_(params, 0.5)
    assert [g.item() for g in grads_of(params)] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("bad", [-1.0, NAN, -INF])
def test_a_negative_or_nan_value_is_refused(bad: float) -> None:
    params = parameters(floats(3.0))
    with pytest.raises(ValueError, match=str(bad)):
        fastclip.clip_grad_value_(params, bad)
    with pytest.raises(ValueError, match=str(bad)):
        fastclip.clip_grad_value_([], bad)
    assert grads_of(params)[0].item() == 3.0
