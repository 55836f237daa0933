"""Every line of the README that can be run, is, and its figures are those of the committed CSV."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import RESULTS, read
from fastclip.monitor import JSONL, Monitor
from tests.printed import assert_alike

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FIRST_SCREEN = 46  # lines; what a code host shows of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[str]:
    """What the README's examples print, run in order."""
    names: dict[str, Any] = {}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            with redirect_stdout(StringIO()) as out:
                exec(block, names)
            found.append(out.getvalue())
    return found


def test_the_first_example_prints_what_is_shown(printed: list[str]) -> None:
    shown = README[README.index("4 gradients") :].split("```")[0]
    assert_alike(printed[0], shown)


def test_the_other_examples_run_and_are_silent(printed: list[str], folder: Path) -> None:
    assert printed[1:] == ["", "", ""]
    records = list(JSONL(folder / "run.jsonl"))
    assert [record.step for record in records] == list(range(200))
    assert Monitor().replay(records) == []


def test_the_figures_are_those_of_the_csv() -> None:
    ratios = {row["name"]: row for row in read(RESULTS / "suite.csv") if row["side"] == "fastclip"}
    row = {name: ratios[f"gpt2-small-{name}"] for name in ("float32", "bfloat16", "float16")}
    clipped = {name: ratios[f"gpt2-small-{name}-clipped"] for name in row}
    read_only = [f"{float(row[name]['ratio']):.1f}" for name in row]
    writing = [f"{float(clipped[name]['ratio']):#.3g}" for name in clipped]
    writing[2] = f"{float(writing[2]):.1f}"
    one_line = " ".join(README.split())
    assert (
        "torch's clip takes {} times as long as fastclip's in float32, {} in bfloat16 and {} in "
        "float16 when nothing has to be clipped".format(*read_only)
        in one_line
    )
    assert "; {}, {} and {} times when something has".format(*writing) in one_line
    home = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    assert (
        "torch's clip takes {} times as long in float32, {} in bfloat16 and {} in float16 when "
        "nothing has to be clipped".format(*read_only)
        in home
    )
    elements = int(row["float32"]["n_bytes"]) / 4
    assert f"GPT-2 small ({elements / 1e6:.0f} M elements)" in one_line
    assert {each["threads"] for each in (*row.values(), *clipped.values())} == {"2"}


def test_the_first_screen_has_what_a_reader_needs() -> None:
    screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
    for needed in ("pip install .", "```python", "norm before: 16.22", "suite.csv", "on a GPU"):
        assert needed in screen


def test_no_link_of_the_readme_is_dead() -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", README)]
    inside = [(file, anchor) for file, _, anchor in links if "://" not in file]
    assert [file for file, _ in inside if file and not (ROOT / file).exists()] == []
    for file, anchor in inside:
        text = (ROOT / file).read_text(encoding="utf-8") if file.endswith(".md") else README
        headings = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert not anchor or anchor in headings, (file, anchor)
