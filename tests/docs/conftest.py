"""The site, built once for all workers."""

import os
from pathlib import Path

import pytest

from tests.docs.site import build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the pages, and what mkdocs said if it is not content."""
    pytest.importorskip("mkdocs", reason="mkdocs, of the extra docs, is not installed")
    from filelock import FileLock  # which torch needs

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, said = shared / "site", shared / "site.txt"
    with FileLock(shared / "site.lock"):
        if not said.exists():
            said.write_text(build(folder))
    return folder, said.read_text()


@pytest.fixture(scope="session")
def site(built: tuple[Path, str]) -> Path:
    """The folder with the pages, which are written even if mkdocs is not content."""
    folder, said = built
    assert (folder / "index.html").exists(), said
    return folder
