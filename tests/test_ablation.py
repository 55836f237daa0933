"""The ablation: what is corrupted, what is counted, and that page and picture follow the CSV."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ablation, ablation_plot
from benchmarks.ablation import QUICK, Run, Training
from fastclip.rules import MaxNorm

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_corrupted_loss_counts_a_hundred_times_and_its_targets_are_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms = []
    for factor in (100.0, 1.0):
        monkeypatch.setattr(ablation, "FACTOR", factor)
        training = Training(None, 0, QUICK)
        training.step(corrupted=True)
        norms += training.norms
    assert norms[0] == pytest.approx(100 * norms[1], rel=1e-4)
    sound = Training(None, 0, QUICK)
    sound.step()
    assert sound.norms[0] != pytest.approx(norms[1], rel=0.1)


def test_runs_of_a_seed_see_the_same() -> None:
    """A threshold that never binds changes nothing, before the event and after it."""
    without, lax = Training(None, 1, QUICK), Training(MaxNorm(1e9), 1, QUICK)
    other = Training(None, 2, QUICK)
    for number in range(5):
        for training in (without, lax, other):
            training.step(corrupted=number == 2)
    assert without.losses == lax.losses
    assert without.norms == pytest.approx(lax.norms)
    assert without.losses != other.losses


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0] * 9, 0),
        ([1.02] * 9, 0),
        ([1.03] * 9, None),
        ([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2),
        ([1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0], 3),  # a dip before the peak is not recovery
        ([3.0, 1.0, 1.0, 1.0, 1.0], None),  # too short to tell
    ],
)
def test_recovered_is_who_stays_within_2_percent(losses: list[float], expected: int | None) -> None:
    assert ablation.recovery(losses, 1.0) == expected


def test_what_is_counted() -> None:
    training, sound = Training(None, 0, QUICK), Training(None, 0, QUICK)
    training.losses = [9.0] * 5 + [2.0] * 10 + [3.0, 5.0] + [2.0] * 28 + [7.0] + [1.0] * 10
    training.norms = [1.0] * 15 + [80.0] + [1.0] * 40
    sound.losses = [1.5] * 60
    assert ablation.judged("rule", 3, 15, training, sound) == Run(
        rule="rule",
        seed=3,
        before=2.0,
        peak=5.0,  # 7 comes too late
        recovery=2,
        final=1.0,
        final_sound=1.5,
        norm=1.0,
        norm_corrupted=80.0,
    )


def test_the_table_has_medians_and_ends() -> None:
    names = ("rule", "before", "peak", "recovery", "final", "final_sound")
    values = [("A", "1", "2", "0", "1", "1"), ("A", "3", "4", "5", "1", "2"), ("A", *"2316", "1")]
    rows = [dict(zip(names, row, strict=True)) for row in values]
    rows.append({**rows[0], "rule": "B", "recovery": ""})
    assert ablation.table(rows).splitlines()[2:] == [
        "| A | 2.000 (1.000 to 3.000) | 3.000 (2.000 to 4.000) | 1 (0 to 5) | "
        "1.000 (1.000 to 6.000) | 1.000 (1.000 to 2.000) |",
        "| B | 1.000 | 2.000 | never | 1.000 | 1.000 |",
    ]


def test_a_quick_run_works_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main(["--quick", "--folder", str(tmp_path)]) == 0
    rows = ablation.read(tmp_path / "ablation.csv")
    assert [row["rule"] for row in rows] == list(ablation.RULES)
    assert all(float(row["peak"]) > 0 and row["torch"] and row["commit"] for row in rows)
    assert capsys.readouterr().out.strip() == ablation.table(rows)
    curves = ablation_plot.read(tmp_path / "ablation-curves.csv")
    assert list(curves) == list(ablation.RULES)
    assert all(not any(curve.excess[:10]) and any(curve.excess) for curve in curves.values())
    for curve in curves.values():
        assert curve.steps == list(range(-10, 10))
        assert all(map(lambda *of: of == tuple(sorted(of)), curve.low, curve.median, curve.high))


# What is committed


def test_the_page_has_the_table_of_the_csv() -> None:
    rows = ablation.read(ablation.RESULTS / "ablation.csv")
    assert list(dict.fromkeys(row["rule"] for row in rows)) == list(ablation.RULES)
    page = (ROOT / "docs" / "clipping-rules.md").read_text()
    assert ablation.table(rows) in page
    assert "(ablation.svg)" in page


def test_the_picture_shows_every_rule_with_units() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    curves = ablation_plot.read(ablation_plot.CURVES)
    left, right = ablation_plot.draw(curves).axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(ablation.RULES)
    for axes in (left, right):
        assert axes.get_xlabel() == "steps after the corrupted batch"
        assert axes.get_ylabel().endswith("validation loss (nats per character)")
    number = list(curves).index("AdaGC")
    assert list(left.lines[number].get_ydata()) == curves["AdaGC"].median
    close_up = list(right.lines[number].get_ydata())
    assert close_up == curves["AdaGC"].excess[: len(close_up)]


def test_the_committed_picture_is_that_of_the_csv(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    assert ablation_plot.main(["--out", str(tmp_path / "again.svg")]) == 0
    drawn = (tmp_path / "again.svg").read_text()
    assert drawn.count("<path") == ablation_plot.PICTURE.read_text().count("<path")


def test_drawing_needs_no_torch() -> None:
    code = "import sys, benchmarks.ablation_plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_picture_of_nothing_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        ablation_plot.main(["--csv", "missing.csv"])
    assert stop.value.code == 2
    assert "missing.csv does not exist: python -m benchmarks.ablation" in capsys.readouterr().err
