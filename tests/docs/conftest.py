"""The site, built once for all workers."""

import os
from pathlib import Path

import pytest

from tests.docs.site import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the pages. Fails with what mkdocs says where it is not content."""
    pytest.importorskip("mkdocs", reason="mkdocs, of the extra docs, is not installed")
    from filelock import FileLock  # which torch needs

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, said = shared / "site", shared / "site.txt"
    with FileLock(shared / "site.lock"):
        if not said.exists():
            said.write_text(build(folder))
    assert said.read_text() == ""
    return folder
