"""The package loads without torch, and has the names it says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fastclip import monitor


@pytest.mark.parametrize("code", ["import fastclip.monitor", "from fastclip.monitor import *"])
def test_importing_loads_nothing_but_the_standard_library(code: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; before = set(sys.modules); {code}; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fastclip" in loaded
    assert not {"torch", "numpy", "triton"} & loaded


def test_names() -> None:
    assert len(set(monitor.__all__)) == len(monitor.__all__)
    assert set(monitor.__all__) <= set(dir(monitor))
    assert [name for name in monitor.__all__ if getattr(monitor, name, None) is None] == []
    with pytest.raises(AttributeError, match=r"'fastclip\.monitor' has no attribute 'Spikes'"):
        monitor.Spikes  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_what_loads() -> None:
    """The imports under TYPE_CHECKING name what loads at run time, and nothing else."""
    assert monitor.__file__ is not None
    tree = ast.parse(Path(monitor.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    static = {alias.name: node.module for node in imports for alias in node.names}
    assert set(static) == set(monitor.__all__)
    for name, module in static.items():
        assert module is not None
        assert getattr(monitor, name) is getattr(sys.modules[module], name), name
