"""What holds for any gradients, tried on random ones on every backend."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastclip
from fastclip import table as tables
from fastclip.testing.variants import Variant
from tests.making import grads_of, parameters

# One test function sees every backend in turn: the fixture is entered once per backend, and holds
# for all of its examples.
settings.register_profile(
    "fastclip",
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fastclip")

pytestmark = pytest.mark.usefixtures("each_backend")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NORM_TYPES = [1.0, 2.0, math.inf, 3.0, 0.5]

# float16's normal range and room to scale by 2**6 in it; zeros too, nothing else below
element = st.one_of(
    st.just(0.0),
    st.floats(2.0**-8, 2.0**8, width=16),
    st.floats(-(2.0**8), -(2.0**-8), width=16),
)
length = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 300, 2049]))


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
    """A few drawn values, repeated to a drawn length."""
    n = draw(length)
    values = draw(st.lists(element, min_size=1, max_size=12))
    kind = dtype or draw(st.sampled_from(DTYPES))
    return torch.tensor((values * (n // len(values) + 1))[:n], dtype=kind)


gradients = st.lists(tensors(), min_size=1, max_size=6)
norm_type = st.sampled_from(NORM_TYPES)


def norm(grads: list[Tensor], p: float) -> float:
    return fastclip.get_total_norm(grads, p).item()


def close(expected: float) -> object:
    """Equal within the norm's own 1e-6, on both sides of the comparison."""
    return pytest.approx(expected, rel=2e-6)


@given(gradients, norm_type, st.integers(-6, 6))
def test_scaling_all_gradients_scales_the_norm(
    each_backend: Variant, grads: list[Tensor], p: float, exponent: int
) -> None:
    scaled = [grad * 2.0**exponent for grad in grads]  # exact: a power of two
    assert norm(scaled, p) == close(norm(grads, p) * 2.0**exponent)


@given(gradients, norm_type, st.randoms(use_true_random=False))
def test_the_order_of_tensors_does_not_matter(
    each_backend: Variant, grads: list[Tensor], p: float, random: object
) -> None:
    shuffled = list(grads)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert norm(shuffled, p) == close(norm(grads, p))
    assert norm(grads[::-1], p) == close(norm(grads, p))


@given(tensors(), norm_type, st.data())
def test_splitting_a_tensor_does_not_matter(
    each_backend: Variant, grad: Tensor, p: float, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, grad.numel()), max_size=4).map(sorted))
    parts = list(grad.tensor_split(cuts))
    assert norm(parts, p) == close(norm([grad], p))
    rows = fastclip.grad_stats(parameters(*parts), p)
    whole = fastclip.grad_stats(parameters(grad), p)
    assert rows.zero_count.sum() == whole.zero_count.sum()
    assert rows.max_abs.max() == whole.max_abs.max()


@given(gradients, norm_type, st.floats(0.01, 2.0))
def test_clipping_twice_changes_nothing_more(
    each_backend: Variant, grads: list[Tensor], p: float, share: float
) -> None:
    """At the same threshold rounding and the 1e-6 of the coefficient are left; above, nothing."""
    params = parameters(*(grad.clone() for grad in grads))
    max_norm = share * norm(grads, p)
    fastclip.clip_grad_norm_(params, max_norm, p)
    once = [grad.clone() for grad in grads_of(params)]
    if max_norm > 0:
        # above it by more than rounding to half types and the 1e-6 come to
        fastclip.clip_grad_norm_(params, max_norm * 1.01 + 2e-6, p)
        assert all(torch.equal(a, b) for a, b in zip(once, grads_of(params), strict=True))
        fastclip.clip_grad_norm_(params, max_norm, p)
    # the coarsest dtype's rounding moves the norm, and with it every gradient
    coarsest = max(torch.finfo(grad.dtype).eps for grad in grads)
    for first, second in zip(once, grads_of(params), strict=True):
        info = torch.finfo(first.dtype)
        rtol = 4 * coarsest + 1e-6 / max_norm if max_norm > 0 else 0.0
        atol = 2 * info.eps * info.smallest_normal
        torch.testing.assert_close(second, first, rtol=rtol, atol=atol)


@given(st.lists(tensors(torch.float32), min_size=1, max_size=6), norm_type, st.floats(0.001, 100))
def test_the_clipped_norm_is_at_most_max_norm(
    each_backend: Variant, grads: list[Tensor], p: float, max_norm: float
) -> None:
    params = parameters(*(grad.clone() for grad in grads))
    before = fastclip.clip_grad_norm_(params, max_norm, p).item()
    after = norm([grad.double() for grad in grads_of(params)], p)
    assert after <= max_norm * (1 + 1e-5)
    if before < max_norm * (1 - 1e-5) - 1e-6:
        assert all(torch.equal(a, b) for a, b in zip(grads_of(params), grads, strict=True))
    elif before > 0.01:
        assert after >= max_norm * (1 - 1e-5) * before / (before + 1e-6)


@given(gradients, norm_type)
def test_layer_norms_combine_to_the_total(
    each_backend: Variant, grads: list[Tensor], p: float
) -> None:
    stats = fastclip.grad_stats(parameters(*grads), p)
    combined = torch.linalg.vector_norm(stats.norms.double(), p).item()
    assert stats.total_norm.item() == close(combined)
    assert tables.total_norm(stats.table, p).item() == close(combined)
    assert stats.grouped(lambda name: "all").norms.item() == close(combined)
