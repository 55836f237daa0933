"""What the comparisons of fastclip.testing take."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip.testing.compare import bitwise_equal


def lone(value: float) -> Tensor:
    """One element that counts as contiguous, with a stride that is not 1."""
    return torch.full((7,), value).as_strided((1,), (5,))


@pytest.mark.parametrize("make", [lone, torch.tensor], ids=["odd-stride", "0-d"])
def test_one_element_is_compared_by_its_bits(make: Callable[[float], Tensor]) -> None:
    assert bitwise_equal(make(math.nan), make(math.nan))
    assert not bitwise_equal(make(0.0), make(-0.0))


def test_lazily_conjugated_and_negated_elements() -> None:
    z = torch.tensor([1 + 2j, 3 - 0j])
    assert bitwise_equal(z.conj(), z.conj().resolve_conj())
    assert bitwise_equal(z.conj().imag, z.conj().resolve_conj().imag)
    assert not bitwise_equal(z.conj(), z)
