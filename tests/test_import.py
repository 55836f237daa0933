"""`import fastclip` is free: nothing else is loaded, nothing compiled, and it takes under 20 ms."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastclip

LIMIT_MS = 20.0
TRIES = 7  # the best of them: what the import costs when nothing else runs on the machine

TIMED_IMPORT = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import fastclip
print((time.perf_counter() - start) * 1e3)
print(*sorted(set(sys.modules) - before))
"""


def python(code: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_import_loads_only_itself_and_the_standard_library() -> None:
    loaded = {name.partition(".")[0] for name in python(TIMED_IMPORT)[1].split()}
    assert "fastclip" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"fastclip"}


@pytest.mark.alone
def test_import_time() -> None:
    times = [float(python(TIMED_IMPORT)[0]) for _ in range(TRIES)]
    assert min(times) < LIMIT_MS, f"milliseconds of each try: {times}"


def test_import_compiles_nothing(tmp_path: Path) -> None:
    python("import fastclip", FASTCLIP_CACHE=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_every_public_name_resolves() -> None:
    assert len(set(fastclip.__all__)) == len(fastclip.__all__)
    assert set(fastclip.__all__) <= set(dir(fastclip))
    missing = [name for name in fastclip.__all__ if getattr(fastclip, name, None) is None]
    assert missing == []


def test_names_of_several_processes_load_when_they_are_used() -> None:
    code = """
import sys, fastclip
print(*fastclip.distributed.__all__, "torch" in sys.modules)
print(fastclip.distributed.Attribution.__name__, fastclip.distributed.attribution_hook.__name__)
"""
    assert python(code) == ["Attribution attribution_hook False", "Attribution attribution_hook"]
    with pytest.raises(
        AttributeError, match=r"'fastclip\.distributed' has no attribute 'combined'"
    ):
        fastclip.distributed.combined  # type: ignore[attr-defined]  # noqa: B018


def test_star_import_gives_exactly_the_public_names() -> None:
    code = "names = {}; exec('from fastclip import *', names); print(*names)"
    assert set(python(code)[0].split()) - {"__builtins__"} == set(fastclip.__all__)


def test_type_checkers_see_what_loads() -> None:
    """The imports under TYPE_CHECKING name what loads at run time, and nothing else."""
    assert fastclip.__file__ is not None
    tree = ast.parse(Path(fastclip.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    static = {alias.name: node.module for node in imports for alias in node.names}
    assert set(static) | {"__version__"} == set(fastclip.__all__)
    for name, module in static.items():
        assert module is not None
        found = getattr(fastclip, name)
        home = sys.modules[module]
        assert found is getattr(home, name), name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'fastclip' has no attribute 'clip'"):
        fastclip.clip  # type: ignore[attr-defined]  # noqa: B018
