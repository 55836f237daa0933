"""The decision table of docs/spikes.md is that of the diagnosis."""

import re
from pathlib import Path

import pytest

from fastclip.monitor.diagnosis.advice import ADVICE
from fastclip.monitor.diagnosis.table import BOUNDARIES, SYMPTOMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spikes.md").read_text("utf-8")
SECTION = PAGE[PAGE.index("| symptom | boundary | if |") : PAGE.index("Choose the smallest change")]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.strip().splitlines()[2:]
]
CODE = re.compile(r"`([^`]+)`")


def test_a_row_for_every_advice_in_its_order() -> None:
    kinds = [(row[0].strip("`"), row[1].strip("`")) for row in ROWS]
    assert kinds == [(each.symptom or "any", each.boundary or "any") for each in ADVICE]
    named = {symptom for symptom, _ in kinds} - {"any"}
    assert named == {each.name for each in SYMPTOMS} - {"none"}
    named = {boundary for _, boundary in kinds} - {"any"}
    assert named == {each.name for each in BOUNDARIES} - {"none", "update"}


def test_what_is_conditional_in_the_code_is_so_on_the_page() -> None:
    assert [bool(row[2]) for row in ROWS] == [each.facts is not None for each in ADVICE]


@pytest.mark.parametrize("place", range(len(ADVICE)))
def test_what_a_row_names_is_named_by_its_advice(place: int) -> None:
    advice = f"{ADVICE[place].action} {ADVICE[place].check}"
    for code in CODE.findall(" ".join(ROWS[place][3:])):
        for word in re.findall(r"[A-Za-z_]\w+", code):
            assert word in advice, code
