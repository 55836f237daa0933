"""Any list, on any small device, in any order of its blocks."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastclip.backends.lists import NORMS
from fastclip.testing import compare, reference64
from tests.cuda_emulated.library import Device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (0.0, -0.0, 1e-40, 3e38, math.inf, -math.inf, math.nan)

a_tensor = st.tuples(
    st.integers(0, 300) | st.integers(0, 20_000),  # elements
    st.sampled_from(DTYPES),
    st.integers(0, 9),  # elements before it
    st.sampled_from((1, 1, 2, 3)),  # stride
    st.lists(st.sampled_from(SPECIAL), max_size=3),
)


def _make(numel: int, dtype: torch.dtype, offset: int, stride: int, special: list[float]) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    storage = torch.randn(offset + stride * (numel + 1), generator=generator).to(dtype)
    grad = storage[offset : offset + stride * numel : stride]
    if numel > 0:
        for value in special:
            grad[torch.randint(numel, (), generator=generator)] = value
    return grad


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    tensors=st.lists(a_tensor, min_size=1, max_size=6),
    p=st.sampled_from(NORMS),
    sm_count=st.integers(1, 3),
    cooperative=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_list(
    device: Device,
    tensors: list[tuple[int, torch.dtype, int, int, list[float]]],
    p: float,
    sm_count: int,
    cooperative: bool,
    seed: int,
) -> None:
    grads = [_make(*facts) for facts in tensors]
    before = [grad.clone() for grad in grads]
    total = reference64.total_norm(before, p)
    max_norm = total / 2 if math.isfinite(total) else 1.0
    with device.having(sm_count=sm_count, cooperative=int(cooperative), seed=seed):
        table, norm, coef = device.backend().clip_(grads, p, max_norm, None)
    assert compare.table_error(table, reference64.table(before, p), before, p) <= 1
    assert compare.norm_error(norm, total, before) <= 1
    share = compare.norm_tolerance(before)
    assert compare.coefficient_error(coef, reference64.coefficient(total, max_norm), share) <= 1
    for after, old in zip(grads, before, strict=True):
        assert compare.scale_error(after, old, float(coef), share) <= 1
