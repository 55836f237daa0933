"""The interpreter, repaired."""

import pytest

from fastclip import backends
from fastclip.backends import Backend
from tests.triton_backend.interpreter import repair

repair()


@pytest.fixture
def triton() -> Backend:
    return backends.get("triton")
