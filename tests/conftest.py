"""Fixtures: every backend at every SIMD level, and the same random numbers in every run."""

from collections.abc import Iterator

import pytest
import torch

from fastclip import backends
from fastclip.backends import Backend, registry
from fastclip.testing.variants import Variant, variants

VARIANTS = variants()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _backends_restored() -> Iterator[None]:
    """Backends that a test, or a page of the documentation, has registered are gone after it."""
    yield
    if registry._registered:
        registry._registered.clear()
        backends._found.cache_clear()


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.id)
def variant(request: pytest.FixtureRequest) -> Variant:
    """A backend at a SIMD level; one that cannot run here is skipped with the reason."""
    chosen: Variant = request.param
    if chosen.unavailable:
        pytest.skip(f"{chosen.id}: {chosen.unavailable}")
    return chosen


@pytest.fixture
def opened(variant: Variant) -> Iterator[Backend]:
    """The variant's backend, at its SIMD level during the test."""
    with variant.open() as backend:
        yield backend


@pytest.fixture
def each_backend(variant: Variant) -> Iterator[Variant]:
    """As `opened`, for tests of the public functions: fastclip.backend is entered too."""
    import fastclip

    with variant.open(), fastclip.backend(variant.backend):
        yield variant


@pytest.fixture
def cpu_available() -> None:
    """Skips where the C++ backend is missing, with the reason."""
    reason = next(variant.unavailable for variant in VARIANTS if variant.simd == "plain")
    if reason:
        pytest.skip(reason)
