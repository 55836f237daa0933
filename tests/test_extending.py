"""The backend of docs/extending/backend.md, packaged as the page says, and checked as it says."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastclip.testing.cases import BACKEND_CASES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending" / "backend.md").read_text("utf-8")

BUILD_WHEEL = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def run(*command: str, cwd: Path, path: Path = ROOT) -> str:
    paths = os.pathsep.join([str(path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages in which that of the page is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(block("toml", "entry-points"))
    (source / "one_array.py").write_text(block("python", "def provide"))
    wheel = run("-c", BUILD_WHEEL, str(site), cwd=source).splitlines()[-1]
    with zipfile.ZipFile(site / wheel) as archive:
        archive.extractall(site)
    return site


def test_the_number_of_cases_is_the_one_on_the_page() -> None:
    assert f"{len(BACKEND_CASES)} awkward lists" in PAGE


@pytest.mark.slow
def test_the_backend_of_the_page_passes_the_case_table(site: Path, tmp_path: Path) -> None:
    command = block("sh", "fastclip check").split()
    printed = run("-m", *command, "--json", cwd=tmp_path, path=site)
    (result,) = json.loads(printed)["backends"]
    assert result["backend"] == "one-array"
    assert (result["cases"], result["mismatches"]) == (len(BACKEND_CASES), [])


def test_the_backend_of_the_page_is_found_by_its_name(site: Path, tmp_path: Path) -> None:
    code = "import fastclip; fastclip.backend('one-array').__enter__(); print('found')"
    assert run("-c", code, cwd=tmp_path, path=site) == "found\n"
