"""Who is at fault, decided from numbers alone, and on chains of factors computed by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip.monitor import find_first_nonfinite
from fastclip.monitor.batch.faults import (
    Gradient,
    Output,
    backward_origin,
    forward_origin,
    largest,
)

NAN, INF = math.nan, math.inf


class Factor(nn.Module):
    """Times a power of two, so that every product is exact, zero or infinite."""

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(2.0**exponent)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=8))
def test_a_chain_of_factors(exponents: Sequence[int]) -> None:
    model = nn.Sequential(*map(Factor, exponents))
    x = torch.ones((), requires_grad=True)
    assert find_first_nonfinite(model, lambda: model(x)) == by_hand(exponents)


def by_hand(exponents: Sequence[int]) -> tuple[str, str] | None:
    factors = [np.float32(2.0**exponent) for exponent in exponents]
    values = [np.float32(1)]
    with np.errstate(over="ignore", under="ignore"):
        for i, factor in enumerate(factors):
            values.append(values[-1] * factor)
            if not np.isfinite(values[-1]):
                return str(i), "forward"
        gradient = np.float32(1)
        for i, factor in reversed(list(enumerate(factors))):
            of_factor, gradient = gradient * values[i], gradient * factor
            if not np.isfinite(of_factor) or not np.isfinite(gradient):
                return str(i), "backward"
    return None


@given(st.lists(st.floats(min_value=0)))
def test_largest(values: list[float]) -> None:
    expected = float(np.max(values)) if values else 0.0  # NumPy's maximum is NaN where one is
    assert largest(values) == pytest.approx(expected, nan_ok=True, rel=0)
    assert math.isnan(largest([*values, NAN]))


def test_the_inner_call_ends_first() -> None:
    outputs = [Output("a", 1, 2), Output("b.c", 2, NAN), Output("b", 1, NAN), Output("", 1, NAN)]
    assert forward_origin(outputs, NAN) == ("b.c", "forward")
    assert forward_origin(outputs[:1], NAN) == ("", "forward")
    assert forward_origin(outputs[:1], -1.0) is None
    assert forward_origin([Output("a", INF, INF)], 1.0) == ("a", "input")
    assert forward_origin([Output("a", INF, 1.0)], 1.0) is None


def test_a_call_is_at_fault_only_for_what_leaves_it() -> None:
    made, lost = Gradient(4, "a", 1, INF, 0), Gradient(4, "a", INF, 0, 0)
    passed = Gradient(4, "a", INF, NAN, NAN)
    other = Gradient(5, "a", INF, NAN, NAN)
    assert backward_origin([made, lost], finite=True) is None
    assert backward_origin([made, passed], finite=True) == ("a", "backward")
    assert backward_origin([made, lost, other], finite=True) is None
    assert backward_origin([made._replace(leaving=INF)], finite=True) == ("a", "backward")


def test_a_sum_that_overflows() -> None:
    fine, met = Gradient(1, "a", 1, 1, 1), Gradient(2, "b", INF, INF, INF)
    assert backward_origin([fine, met], finite=True) is None
    assert backward_origin([fine, met], finite=False) == ("b", "backward")
    assert backward_origin([fine], finite=False) == ("", "backward")
    assert backward_origin([], finite=False) == ("", "backward")
