"""The suite under pytest-benchmark: recorded seconds are replayed, and runs compared."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import Ratio, moved, ratios
from fastclip.benchmarking.contest import OURS

ROOT = Path(__file__).resolve().parent.parent


def row(name: str, side: str, ratio: float, baseline: str = "torch foreach") -> dict[str, object]:
    spread = {"ratio_p20": ratio * 0.95, "ratio_p80": ratio * 1.05}
    return {"name": name, "side": side, "baseline": baseline, "ratio": ratio, **spread}


def test_ratios_are_those_of_sides_that_ran_and_are_not_the_baseline() -> None:
    gap: dict[str, object] = {"name": "a", "side": "timm", "gap": "not there"}
    memory: dict[str, object] = {"name": "m", "side": OURS, "extra_bytes": 4096, "ratio": ""}
    found = ratios([row("a", OURS, 2.0), row("a", "torch foreach", 1.0), gap, memory])
    assert found == {("a", OURS): Ratio("torch foreach", 1.9, 2.0, 2.1)}


def test_a_ratio_has_moved_when_the_ranges_do_not_meet() -> None:
    old = ratios([row("a", OURS, 2.0), row("b", OURS, 2.0), row("c", OURS, 2.0), row("d", OURS, 1)])
    new = ratios([row("a", OURS, 2.1), row("b", OURS, 2.5), row("c", OURS, 1.0), row("e", OURS, 9)])
    assert moved(old, new) == [
        "c, fastclip: 2.00 (1.90 - 2.10) to 1.00 (0.95 - 1.05) times torch foreach",
        "b, fastclip: 2.00 (1.90 - 2.10) to 2.50 (2.38 - 2.62) times torch foreach",
    ]


def test_a_new_baseline_and_another_machine_are_named(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    with path.open("w", newline="") as file:
        old = {**row("a", OURS, 2.0), "cpu": "Abacus", "threads": 2}
        writer = csv.DictWriter(file, old)
        writer.writeheader()
        writer.writerow(old)
    new = {**row("a", OURS, 3.0, "torch for-loop"), "cpu": "Slide rule", "threads": 2}
    text = compare.report(path, [new]).splitlines()
    assert text[:2] == [
        "cpu: Abacus, now Slide rule",
        "1 of 1 ratios moved by more than their spread",
    ]
    assert text[2].endswith("times torch foreach, now torch for-loop")


def test_nothing_to_compare_with_is_said(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    assert compare.report(path, []) == f"nothing to compare with: there is no {path}"
    path.write_text("name,ratio\na,1.0\n")
    assert "is not a run of this suite" in compare.report(path, [row("a", OURS, 1.0)])
    path.write_text("name,side\na,fastclip\n")
    assert compare.report(path, []) == "nothing to compare: no row was measured"


def test_rows_that_are_left_out_are_not_counted_as_passed(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("name,side\na,fastclip\n")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "benchmarks/bench_suite.py"]
    options = ["--small", "-k", "gpt2-xl-float32-clipped", "--against", str(old), "--csv", str(new)]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" not in done.stdout
    assert "6 skipped" in done.stdout
    assert "nothing to compare: no row was measured" in done.stdout
    assert not new.exists()


@pytest.mark.alone  # pytest-benchmark writes nothing under pytest-xdist
def test_the_suite_replays_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--benchmark-quiet"]
    names = "step-adamw-fastclip or step-adamw-torch or statistics-2000x1024"
    options = [
        *("benchmarks/bench_suite.py", "--small", "--threads", "1", "-k", names),
        *("--benchmark-json", str(tmp_path / "new.json"), "--csv", str(tmp_path / "new.csv")),
        *("--against", str(tmp_path / "none.csv")),
    ]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to compare with" in done.stdout
    with (tmp_path / "new.csv").open(newline="") as file:
        rows = {(row["name"], row["side"]): row for row in csv.DictReader(file)}
    report = json.loads((tmp_path / "new.json").read_text())
    assert len(report["benchmarks"]) == len(rows) == 4
    for one in report["benchmarks"]:
        about, extra = one["stats"], one["extra_info"]
        row = rows[extra["name"], extra["side"]]
        assert about["rounds"] == int(row["rounds"])
        assert about["median"] * 1e3 == pytest.approx(float(row["ms"]), rel=1e-3)
        assert str(extra["ratio"]) == row["ratio"]
        assert one["group"] == row["title"]


def test_the_suite_is_collected_by_name_alone() -> None:
    names = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert "bench_suite.py" in names
    assert not [name for name in names if name.startswith("test_") or name.endswith("_test.py")]
