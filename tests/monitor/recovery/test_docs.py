"""Every block of docs/recovery.md runs, in order, and prints what is said."""

import re
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fastclip.monitor import RollbackPolicy
from tests.monitor.recovery.making import event

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "recovery.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.compile(r"```python\n([^`]*)```\n\nprints[^`]*```\n([^`]*)```")
LOGGED = re.findall(r"^rolling back .*", PAGE, re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)`(?:, `(\w+)`)? \| ([^|]+) \|", re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+")


def test_every_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = dict(SHOWN.findall(PAGE))
    assert len(shown) == 4
    names: dict[str, Any] = {}
    for block in BLOCKS:
        out = StringIO()
        with redirect_stdout(out):
            exec(block, names)
        printed, said = out.getvalue(), shown.pop(block, "")
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", said)
        for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(said), strict=True):
            assert float(ours) == pytest.approx(float(theirs), rel=0.02)
    assert shown == {}
    logged = [each.message for each in caplog.records if each.name == "fastclip"]
    assert [text for text in logged if text.startswith("rolling back")] == LOGGED
    assert [names["policy"].ranks(event(160, onset)) for onset in (150, 151)] == [[1], None]


def test_the_table_of_the_policy() -> None:
    policy = RollbackPolicy()
    rows: dict[str, str] = {}
    for first, second, values in ROW.findall(PAGE):
        each = [name for name in (first, second) if name]
        rows |= dict(zip(each, values.replace("`", "").split(", "), strict=True))
    assert list(rows) == [field.name for field in fields(policy)]
    for name, value in rows.items():
        assert str(getattr(policy, name)) == value.strip('" ')
