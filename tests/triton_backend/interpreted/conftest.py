"""The interpreter made faster, and what it does worse than a GPU allowed for."""

import pytest
import torch

from fastclip import backends
from fastclip.backends import Backend
from fastclip.testing import tolerances
from tests.triton_backend.interpreter import hurry

hurry()


@pytest.fixture(autouse=True)
def _bfloat16_stores_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not round to nearest there: up to 1 ulp instead of half of one."""
    allowed = {**tolerances.SCALE_ULP, torch.bfloat16: 1.01}
    monkeypatch.setattr(tolerances, "SCALE_ULP", allowed)


@pytest.fixture
def triton() -> Backend:
    return backends.get("triton")
