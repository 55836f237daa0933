"""Gradients and callers that have broken this or another library: a test for each kind of fault."""

import math
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fastclip
from fastclip.backends import get
from tests.making import floats, grads_of, parameters

pytestmark = pytest.mark.usefixtures("each_backend")


def clip(grad: Tensor) -> Tensor:
    return fastclip.clip_grad_norm_(parameters(grad), 1.0)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_records_the_call_and_no_constant(mode: Literal["real", "fake"]) -> None:
    traced = make_fx(lambda x: fastclip.get_total_norm([x]), tracing_mode=mode)(torch.ones(3))
    assert traced(floats(0.0, 3.0, 4.0)).item() == 5.0
    grad = floats(0.0, 3.0, 4.0)
    assert make_fx(clip)(torch.ones(3))(grad).item() == 5.0
    assert grad.tolist() == pytest.approx([0.0, 0.6, 0.8], rel=1e-6)


def test_a_dispatch_mode_sees_the_operator() -> None:
    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        assert clip(floats(3.0, 4.0)).item() == 5.0
    assert any(name.startswith("fastclip.clip_") for name in names)


def test_compiled_with_one_memory_under_two_tensors() -> None:
    torch.compiler.reset()
    grad = torch.full((4,), 10.0)
    compiled = torch.compile(
        lambda params: fastclip.clip_grad_norm_(params, 1.0), backend="aot_eager"
    )
    assert compiled(parameters(grad, grad.detach())).item() == 20.0
    assert grad.tolist() == pytest.approx([0.5] * 4, rel=1e-6)


def sparse_with_one_stored_value() -> Tensor:
    """A coalesced gradient whose four values are one number expanded: autograd makes such."""
    indices = torch.tensor([[0, 1, 2, 3]])
    values = torch.ones(1).expand(4)
    return torch.sparse_coo_tensor(indices, values, (4,), is_coalesced=True, check_invariants=False)


def test_sparse_values_that_are_expanded() -> None:
    params = parameters(torch.full((2,), 10.0), sparse_with_one_stored_value())
    total = fastclip.clip_grad_norm_(params, 1.0)
    assert total.item() == pytest.approx(math.sqrt(204), rel=1e-6)
    dense, sparse = grads_of(params)
    assert dense.tolist() == pytest.approx(2 * [10 / math.sqrt(204)], rel=1e-6)
    assert sparse._values().tolist() == pytest.approx(4 * [1 / math.sqrt(204)], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_negated_view_keeps_its_sign(dtype: torch.dtype) -> None:
    grad = torch._neg_view(floats(3.0, 4.0, dtype=dtype))
    fastclip.clip_grad_norm_(parameters(grad), 1.0)
    assert grad.tolist() == pytest.approx([-0.6, -0.8], rel=1e-2)


def test_clip_value_beyond_a_half_type() -> None:
    wide = floats(3e5, -3e5, dtype=torch.float64)
    half = floats(1.0, math.inf, -math.inf, math.nan, dtype=torch.float16)
    fastclip.clip_grad_value_(parameters(wide, half), 1e5)
    assert wide.tolist() == [1e5, -1e5]
    assert half.tolist()[:3] == [1.0, 65504.0, -65504.0]
    assert math.isnan(half[3].item())


def test_an_error_of_the_callers_generator_is_the_callers() -> None:
    def broken() -> Iterator[Tensor]:
        yield parameters(floats(1.0))[0]
        raise TypeError("the caller's own")

    with pytest.raises(TypeError, match="the caller's own"):
        fastclip.clip_grad_norm_(broken(), 1.0)


@pytest.mark.parametrize("p", [2.0, 0.0, math.inf, -math.inf, -2.0])
def test_no_gradients_have_norm_zero_in_every_function(p: float) -> None:
    assert fastclip.grad_stats([], p).total_norm.item() == 0.0
    assert fastclip.clip_grad_norm_([], 1.0, norm_type=p).item() == 0.0


def test_large_strided_gradients_take_little_memory_in_the_reference() -> None:
    """Order 3 is the reference's; what is not contiguous must be cut in pieces as well."""
    grad = torch.randn(600, 700).t()[::2]
    expected = grad.double().abs().pow(3).sum().pow(1 / 3).item()
    assert fastclip.get_total_norm([grad], 3.0).item() == pytest.approx(expected, rel=1e-6)
    fastclip.clip_grad_norm_(parameters(grad), 1.0, norm_type=3.0)
    assert fastclip.get_total_norm([grad], 3.0).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    "coef", [torch.tensor(0.5), torch.ones(4, dtype=torch.float64)[::2]], ids=["float32", "strided"]
)
def test_the_raw_operator_refuses_coefficients_it_cannot_read(coef: Tensor) -> None:
    try:
        get("cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="coef must be contiguous, float64 and on the CPU"):
        torch.ops.fastclip_native.scale_([torch.ones(2), torch.ones(2)], coef)
