"""What docs/checklist.md names is there."""

import re
from pathlib import Path

import pytest

import fastclip
import fastclip.monitor
from fastclip.cli import ARGUMENTS, COMMANDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checklist.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
ACTIONS = [row for row in ROWS if row != ("do", "with") and not set(row[0]) <= {"-"}]
CODE = [code for _, cell in ACTIONS for code in re.findall(r"`([^`]+)`", cell)]
RUN = [code for code in CODE if code.startswith("fastclip ")]
METHODS = {
    "stats": fastclip.GradStats,
    "clipper": fastclip.GradClipper,
    "recovery": fastclip.monitor.Recovery,
    "monitor": fastclip.monitor.Monitor,
    "event": fastclip.monitor.Event,
    "fastclip": fastclip,
}


def test_every_action_has_its_code_or_its_page() -> None:
    assert len(ACTIONS) > 40
    assert [action for action, cell in ACTIONS if "`" not in cell and "](" not in cell] == []


@pytest.mark.parametrize("command", sorted(set(RUN)))
def test_every_command_is_one(command: str) -> None:
    _, name, *rest = command.split()
    assert name in COMMANDS
    known = {flag for flag, _ in ARGUMENTS.get(name, [])} | {"--json"}
    assert {word for word in rest if word.startswith("-")} <= known


@pytest.mark.parametrize("code", sorted({c for c in CODE if re.match(r"(\w+)\.(\w+)", c)}))
def test_every_method_is_one(code: str) -> None:
    for owner, name in re.findall(r"\b(\w+)\.(\w+)", code):
        if owner in METHODS:
            fields = getattr(METHODS[owner], "__annotations__", {})
            assert hasattr(METHODS[owner], name) or name in fields


@pytest.mark.parametrize("code", sorted({c for c in CODE if re.match(r"[A-Z]\w+\(", c)}))
def test_every_class_is_one(code: str) -> None:
    for name in re.findall(r"\b([A-Z]\w+)\(", code):
        assert name in fastclip.__all__ or name in fastclip.monitor.__all__
