"""What else is true of a page once its blocks have been run."""

import re
from dataclasses import fields

import pytest

import fastclip.monitor
from fastclip.monitor import JSONL, RollbackPolicy, StepRecord, default_detectors
from fastclip.monitor.records import COLUMNS
from fastclip.monitor.watches.outputs import ModuleStats
from fastclip.stats import FIELDS, LayerStats
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


def statistics(ran: Ran) -> None:
    """Every field of what is handed out is in the table of its section, and nothing else."""
    page = text("statistics.md")
    sections = dict(
        re.findall(r"^#{2,3} (.+?)\n(.*?)(?=^#{2,3} |\Z)", page, re.MULTILINE | re.DOTALL)
    )
    tables = {
        title: re.findall(
            r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
        )
        for title, section in sections.items()
    }
    assert sorted(tables["A step"]) == sorted(field.name for field in fields(StepRecord))
    assert sorted(tables["The gradients"]) == sorted([*FIELDS, "loss_scale"])
    assert tuple(tables["A row of a layer"]) == COLUMNS
    rows = sections["The gradients"].partition("`stats.layers()`")[2]
    said = [*LayerStats._fields, *ran.names["clipper"].counters()]
    assert [name for name in said if f"`{name}`" not in rows] == []
    assert [n for n in ModuleStats._fields[1:] if f"`{n}`" not in sections["The activations"]] == []


CHECKS = {"monitoring.md": monitoring, "recovery.md": recovery, "statistics.md": statistics}
