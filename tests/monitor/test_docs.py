"""Every block of docs/monitoring.md runs, in order, and does what is said; that for several ranks
is run in tests/distributed."""

import re
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import fastclip.monitor
from fastclip.monitor import JSONL, LayerRow, StepRecord, default_detectors
from tests.printed import assert_alike

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.compile(r"prints, up to the last digits,\n\n```\n(.*?)```", re.DOTALL)
SOLO = [block for block in BLOCKS if "torchrun" not in block]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], Path]:
    """What the blocks leave behind, what each printed, and the folder they ran in."""
    names: dict[str, Any] = {}
    printed: list[str] = []
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in SOLO:
            out = StringIO()
            with redirect_stdout(out):
                exec(block, names)
            printed.append(out.getvalue())
    return names, printed, folder


def test_every_block_is_run(ran: tuple[dict[str, Any], list[str], Path]) -> None:
    names, printed, _ = ran
    assert (len(BLOCKS), len(printed)) == (12, 11)
    assert names["event"].onset == 250
    assert names["found"].clip_rate == pytest.approx(0.05, abs=0.01)
    assert names["worst"].name in dict(names["model"].named_parameters())


@pytest.mark.parametrize("place", range(2))
def test_what_is_printed_is_what_is_shown(
    place: int, ran: tuple[dict[str, Any], list[str], Path]
) -> None:
    shown = SHOWN.findall(PAGE)
    assert len(shown) == 2
    block = next(i for i, block in enumerate(SOLO) if shown_after(block) == shown[place])
    assert_alike(ran[1][block], shown[place])


def shown_after(block: str) -> str | None:
    """What the page shows right behind a block, if it shows something."""
    rest = PAGE[PAGE.index(block) + len(block) :].removeprefix("```\n\n")
    found = SHOWN.match(rest)
    return found and found[1]


def test_the_table_of_metrics_is_the_record() -> None:
    section = PAGE[PAGE.index("## What is recorded") : PAGE.index("### Rows of layers")]
    metrics = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(metrics) == sorted(field.name for field in fields(StepRecord))
    rows = PAGE[PAGE.index("### Rows of layers") : PAGE.index("## No stall")]
    assert all(f"`{column}`" in rows for column in LayerRow._fields)


def test_the_table_of_detectors_is_the_default_set() -> None:
    section = PAGE[PAGE.index("## Detectors") : PAGE.index("### Events")]
    calls = re.findall(r"^\| `(\w+\(.*?\))` \|", section, re.MULTILINE)
    assert [eval(call, vars(fastclip.monitor) | _names()) for call in calls] == default_detectors()


def _names() -> dict[str, Any]:
    return {name: getattr(fastclip.monitor, name) for name in fastclip.monitor.__all__}


def test_the_log_of_the_loop(ran: tuple[dict[str, Any], list[str], Path]) -> None:
    records = list(JSONL(ran[2] / "run.jsonl"))
    assert [record.step for record in records] == [*range(301), 200]
    assert [record.attempt for record in records] == [0] * 301 + [1]
