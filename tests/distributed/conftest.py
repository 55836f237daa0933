"""The processes that the tests share."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Pool


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.fixture
def ranks(shared_ranks: Pool) -> Pool:
    """Four processes that live for all tests: ``ranks.run(size, job, ...)``."""
    return shared_ranks


@pytest.fixture
def mortal_ranks() -> Iterator[Pool]:
    """Up to four processes of a test's own, which may be killed."""
    with Pool(4) as pool:
        yield pool
