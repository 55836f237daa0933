"""What is committed of the fault laboratory: the CSVs, the page and the picture agree."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fault_lab_plot
from examples.fault_lab import CLEAN, FAULTS, Curve, broken, main, read, tables
from examples.fault_run import Outcome

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fault-lab.csv"


def test_ten_seeds_of_every_fault_keep_the_promises() -> None:
    outcomes = read(RESULTS)
    names = [fault.name for fault in (*CLEAN, *FAULTS)]
    assert [(each.fault, each.seed) for each in outcomes] == [
        (n, s) for n in names for s in range(10)
    ]
    assert [text for outcome in outcomes for text in broken(outcome)] == []


def test_the_page_has_the_tables_of_the_csv() -> None:
    page = (ROOT / "docs" / "fault-lab.md").read_text()
    assert all(table in page for table in tables(read(RESULTS)))
    assert "(fault-lab.svg)" in page


@pytest.mark.parametrize("page", ["README.md", "docs/fault-lab.md"])
def test_the_page_has_the_range_of_the_csv(page: str) -> None:
    faulty = [one for one in read(RESULTS) if one.fault in {fault.name for fault in FAULTS}]
    assert len(faulty) == 7 * 10
    over = [100 * (one.final / one.clean - 1) for one in faulty]
    text = (ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
    assert f"a final loss {-min(over):.2f} % under to {max(over):.2f} % over that of" in text


def test_the_committed_picture_is_that_of_the_csvs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    assert fault_lab_plot.main(["--out", str(tmp_path / "again.svg")]) == 0
    drawn = (tmp_path / "again.svg").read_text()
    assert drawn.count("<path") == fault_lab_plot.PICTURE.read_text().count("<path")


def test_every_fault_has_a_panel() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    cases = fault_lab_plot.read(RESULTS, fault_lab_plot.RESULTS / "fault-lab-curves.csv")
    figure = fault_lab_plot.draw(cases)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[: len(FAULTS)] == [fault.name for fault in FAULTS]
    with RESULTS.open(newline="") as file:
        alarms = {r["fault"]: r["detected"] for r in csv.DictReader(file) if r["seed"] == "0"}
    assert {name: str(case.alarm) for name, case in cases.items()}.items() <= alarms.items()


def test_a_broken_promise_is_said_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, *others = read(RESULTS)
    late = others[-1]._replace(onset=others[-1].injected + 1)
    found: dict[str, list[tuple[Outcome, Curve]]] = {
        "kept": [(kept, [])],
        "broken": [(kept, []), (late, [])],
    }
    for case, outcomes in found.items():
        monkeypatch.setattr("examples.fault_lab.run_all", lambda *_, found=outcomes: found)
        assert main([]) == (case == "broken")
    said = capsys.readouterr().err
    assert said == "poisoned-rank, seed 9: onset 1 steps after the injection\n"


def test_drawing_needs_no_torch() -> None:
    code = "import sys, benchmarks.fault_lab_plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_picture_of_nothing_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fault_lab_plot.main(["--csv", "missing.csv"])
    assert stop.value.code == 2
    assert "missing.csv does not exist: python -m examples.fault_lab" in capsys.readouterr().err
