"""The processes that the tests share."""

import multiprocessing
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Pool


@pytest.fixture(scope="package")
def _able() -> None:
    """Skips where there is no gloo or no forkserver, with the reason."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes cannot be forked from a server here")


# Not of the whole session: with the groups of all tests, gloo's threads keep a core busy for good.
@pytest.fixture(scope="package")
def shared_ranks(_able: None) -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.fixture
def ranks(shared_ranks: Pool) -> Pool:
    """Four processes that live for all tests here: ``ranks.run(size, job, ...)``."""
    return shared_ranks


@pytest.fixture
def mortal_ranks(_able: None) -> Iterator[Pool]:
    """Up to four processes of a test's own, which may be killed."""
    with Pool(4) as pool:
        yield pool
