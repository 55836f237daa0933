"""The floors of the house: no module imports one of a floor above its own.

The imports are those in the source, at the top of a module or within a function; those that only a
type checker sees do not count.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastclip

ROOT = Path(fastclip.__file__).parent

# From the ground up, modules and packages of fastclip. Within a floor they may import each other.
FLOORS: dict[str, set[str]] = {
    "ground": {"_build", "_build_cuda", "accelerated", "caller", "checks", "redirecting"}
    | {"sampling", "strides", "table", "uncompiled"},
    "backends": {"backends", "watching"},
    "gradients": {"distributed", "folding", "gradients", "listing", "memory", "ops", "overlap"}
    | {"passes", "policy", "ranks", "rules", "scaling", "stats", "step", "stepping", "traced"},
    "clipping": {"clipper", "functional", "order"},
    "monitor": {"monitor"},
    "integrations": {"integrations"},
    "the public names": {""},
    "checks of all this": {"benchmarking", "testing"},
    "the command line": {"__main__", "cli", "commands"},
}
HEIGHT = {part: height for height, parts in enumerate(FLOORS.values()) for part in parts}
MODULES = sorted(ROOT.rglob("*.py"))
IDS = [path.relative_to(ROOT).as_posix() for path in MODULES]


def part_of(name: str) -> str:
    """What a module, ``fastclip.backends.cuda``, is of: ``backends``; "" is fastclip itself."""
    part = name.split(".")[1] if "." in name else ""
    return part if (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file() else ""


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of fastclip that are imported when the program runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imported(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = (
                ["fastclip"] if node.level else []
            )  # relative ones are in its first folder alone
            parts += [node.module] if node.module else []
            yield from (".".join([*parts, alias.name]) for alias in node.names)
        else:
            yield from imported(node)


def test_every_part_is_on_one_floor() -> None:
    inside = [path for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()]
    parts = {path.stem for path in inside} - {"__init__", "__pycache__"}
    assert sorted(part for floor in FLOORS.values() for part in floor) == sorted(parts | {""})


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_no_module_imports_a_floor_above_its_own(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    height = HEIGHT[own.removeprefix("__init__")]
    names = imported(ast.parse(path.read_text(encoding="utf-8")))
    above = {
        name for name in names if name.startswith("fastclip.") and HEIGHT[part_of(name)] > height
    }
    assert above == set()


def test_what_counts_as_an_import() -> None:
    text = """
import fastclip.clipper, torch
from fastclip import __version__, gradients
if TYPE_CHECKING:
    from fastclip.monitor import Monitor
else:
    from fastclip.rules import Rule
def late():
    with suppress(ImportError):
        from fastclip.backends.cuda import plan
"""
    found = [name for name in imported(ast.parse(text)) if name.startswith("fastclip")]
    assert found == [
        *("fastclip.clipper", "fastclip.__version__", "fastclip.gradients", "fastclip.rules.Rule"),
        "fastclip.backends.cuda.plan",
    ]
    assert [*map(part_of, found)] == ["clipper", "", "gradients", "rules", "backends"]
