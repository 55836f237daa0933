"""The public surface as the type checker of a user sees it: installed, by its py.typed, in strict
mode, with none of this repository's settings.
"""

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import fastclip
from fastclip.monitor.records import NAMES

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    path for path in (ROOT / "tests" / "typing").glob("*.py") if path.stem != "__init__"
)
# Packages with an __all__, whose names may load late.
PACKAGES = [
    "fastclip",
    *(
        f"fastclip.{module.name}"
        for module in pkgutil.iter_modules(fastclip.__path__)
        if module.ispkg and hasattr(importlib.import_module(f"fastclip.{module.name}"), "__all__")
    ),
]

MISSING = [name for name in ("mypy", "lightning", "transformers") if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def every_name() -> str:
    """A script that uses every public name; one that is Any to the checker is an error in it."""
    lines = ["# mypy: disallow-any-expr", *(f"import {package}" for package in PACKAGES)]
    for package in PACKAGES:
        lines += [f"{package}.{name}" for name in importlib.import_module(package).__all__]
    return "\n".join([*lines, ""])


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which fastclip is installed, beside what is here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(
        ROOT / "fastclip", site / "fastclip", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def checked(
    python: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> "subprocess.CompletedProcess[str]":
    """All scripts through one run of mypy, from a folder of their own."""
    folder = tmp_path_factory.mktemp("scripts")
    for script in SCRIPTS:
        shutil.copy(script, folder)
    (folder / "every_name.py").write_text(every_name())
    cache = request.config.cache
    assert cache is not None
    options = ("--strict", "--no-error-summary", "--show-error-codes", "--config-file=")
    return subprocess.run(
        [
            *(sys.executable, "-m", "mypy", *options),
            *("--python-executable", str(python)),
            *("--cache-dir", str(cache.mkdir("typing")), "."),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", [*(path.stem for path in SCRIPTS), "every_name"])
def test_a_script_is_as_it_says(script: str, checked: "subprocess.CompletedProcess[str]") -> None:
    """No error but those that its comments expect, each of which is one: an expectation that is not
    met is an error in strict mode."""
    assert checked.returncode in (0, 1), checked.stderr
    mine = [line for line in checked.stdout.splitlines() if line.startswith(f"{script}.py")]
    assert mine == []


def test_nothing_else_is_said(checked: "subprocess.CompletedProcess[str]") -> None:
    assert (checked.stdout, checked.stderr, checked.returncode) == ("", "", 0)


def test_observe_takes_the_fields_of_a_record() -> None:
    tree = ast.parse((ROOT / "fastclip" / "monitor" / "observed.py").read_text("utf-8"))
    (fields,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Fields"
    ]
    names = [ast.unparse(item.target) for item in fields.body if isinstance(item, ast.AnnAssign)]
    assert names == [name for name in NAMES if name != "step"]


def test_what_is_checked_is_the_installed_package(python: Path, tmp_path: Path) -> None:
    """Without its py.typed the package has no types, which strict mode says."""
    (marker,) = python.parent.parent.glob("lib/python*/site-packages/fastclip/py.typed")
    (tmp_path / "script.py").write_text("import fastclip\n")
    marker.unlink()
    try:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "mypy", "--strict", "--config-file="),
                *("--cache-dir", str(tmp_path / "cache"), "--python-executable", str(python)),
                "script.py",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        marker.touch()
    assert re.search(r"script\.py:1: error: .*py\.typed.*import-untyped", run.stdout)
