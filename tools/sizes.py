"""Fails on a source file over 400 lines or a Python function over 50."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fastclip", "csrc", "tests", "benchmarks", "examples", "tools")
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
FILE_LINES = 400
FUNCTION_LINES = 50


def faults(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{path}:1: {lines} lines, more than {FILE_LINES}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, over {FUNCTION_LINES}"


def main() -> int:
    files = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES
    ]
    found = [fault for path in [*files, ROOT / "setup.py"] for fault in faults(path)]
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
