"""What else is true of a page once its blocks have been run."""

import re
from dataclasses import fields

import pytest

import fastclip.monitor
from fastclip.monitor import JSONL, LayerRow, RollbackPolicy, StepRecord, default_detectors
from tests.docs.pages import Ran, text
from tests.monitor.recovery.making import event

_POLICY = re.compile(r"^\| `(\w+)`(?:, `(\w+)`)? \| ([^|]+) \|", re.MULTILINE)


def monitoring(ran: Ran) -> None:
    names = ran.names
    assert len(ran.printed) == 11
    assert names["event"].onset == 250
    assert names["found"].clip_rate == pytest.approx(0.05, abs=0.01)
    assert names["worst"].name in dict(names["model"].named_parameters())
    records = list(JSONL(ran.folder / "run.jsonl"))
    assert [record.step for record in records] == [*range(301), 200]
    assert [record.attempt for record in records] == [0] * 301 + [1]

    page = text("monitoring.md")
    section = page[page.index("## What is recorded") : page.index("### Rows of layers")]
    metrics = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(metrics) == sorted(field.name for field in fields(StepRecord))
    rows = page[page.index("### Rows of layers") : page.index("## No stall")]
    assert all(f"`{column}`" in rows for column in LayerRow._fields)
    section = page[page.index("## Detectors") : page.index("### Events")]
    calls = re.findall(r"^\| `(\w+\(.*?\))` \|", section, re.MULTILINE)
    known = {name: getattr(fastclip.monitor, name) for name in fastclip.monitor.__all__}
    assert [eval(call, known) for call in calls] == default_detectors()


def recovery(ran: Ran) -> None:
    page = text("recovery.md")
    assert len(ran.printed) == 7
    rolled_back = re.findall(r"^rolling back .*", page, re.MULTILINE)
    assert [said for said in ran.logged if said.startswith("rolling back")] == rolled_back
    assert [ran.names["policy"].ranks(event(160, onset)) for onset in (150, 151)] == [[1], None]

    policy = RollbackPolicy()
    rows: dict[str, str] = {}
    for first, second, values in _POLICY.findall(page):
        each = [name for name in (first, second) if name]
        rows |= dict(zip(each, values.replace("`", "").split(", "), strict=True))
    assert list(rows) == [field.name for field in fields(policy)]
    for name, value in rows.items():
        assert str(getattr(policy, name)) == value.strip('" ')


CHECKS = {"monitoring.md": monitoring, "recovery.md": recovery}
