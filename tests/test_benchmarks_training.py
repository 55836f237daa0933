"""The training-step benchmark: all variants train the same, and the rows say what was measured."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import training
from benchmarks.text import VOCABULARY, batch, text
from benchmarks.training import FUNCTION, NONE, QUICK, STEP, TORCH, VARIANTS, Training


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_text_is_words_of_ascii() -> None:
    train, held_out = text()
    assert len(train) > 8 * len(held_out) > 200_000
    assert int(torch.cat([train, held_out]).max()) < VOCABULARY
    assert "exception" in bytes(held_out.tolist()).decode("ascii")


def test_targets_are_the_inputs_moved_by_one() -> None:
    inputs, targets = batch(torch.arange(1000), 3, 64, torch.Generator().manual_seed(0))
    assert inputs.shape == (3, 64)
    assert torch.equal(targets, inputs + 1)


def test_variants_that_clip_train_the_same_and_the_other_does_not() -> None:
    runs = training.train(QUICK)
    training.require_same_training(runs)
    assert all(len(run.losses) == QUICK.steps for run in runs.values())
    assert all(all(norm > training.MAX_NORM for norm in runs[name].norms) for name in VARIANTS[1:])
    for name in (FUNCTION, STEP):
        assert training.farthest(runs[name], runs[TORCH]) < 1e-4
        assert runs[name].norms == pytest.approx(runs[TORCH].norms, rel=1e-3)
    assert training.farthest(runs[NONE], runs[TORCH]) > 1e-4
    assert runs[TORCH].losses[-1] < runs[TORCH].losses[0]


@pytest.mark.parametrize("off", [0.02, math.nan], ids=["far", "NaN"])
def test_a_training_that_differs_is_no_result(off: float) -> None:
    runs = training.train(replace(QUICK, steps=1))
    runs[STEP].losses[0] += off
    with pytest.raises(RuntimeError, match=r"losses of GradClipper\.step and of torch's clip"):
        training.require_same_training(runs)


def finished(variant: str, step_s: list[float], update_s: list[float]) -> Training:
    run = Training(QUICK, variant)
    run.losses, run.norms = [3.0, 2.0, 1.0], [2.0, 0.5, math.nan if variant == NONE else 3.0]
    run.step_s, run.update_s = step_s, update_s
    return run


def test_the_cost_of_clipping_is_paired_and_the_first_steps_do_not_count() -> None:
    first = [1000.0] * QUICK.warm_up
    runs = {
        NONE: finished(NONE, [*first, 10.0, 20.0, 30.0], [*first, 1.0, 2.0, 9.0]),
        TORCH: finished(TORCH, [*first, 20.0, 40.0, 50.0], [*first, 5.0, 9.0, 10.0]),
    }
    without, with_torch = training.summary(runs)
    assert (without["step_ms"], without["update_ms"]) == (20_000.0, 2_000.0)
    assert without["torch_step_over_step"] == 2.0
    assert "clip_ms" not in without
    assert with_torch["clip_ms"] == 4_000.0  # the median of 4, 7 and 1; medians apart give 7
    assert with_torch["clip_share"] == 0.175  # of 4 / 20, 7 / 40 and 1 / 50
    assert (with_torch["clipped_steps"], with_torch["last_loss"]) == (2, 1.0)


def test_a_quick_run_works_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--quick", "--threads", "1", "--folder", str(tmp_path)]
    assert training.main(command) == 0
    printed = capsys.readouterr().out
    assert "nats apart from torch's" in printed
    with (tmp_path / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == list(VARIANTS)
    for row in rows:
        assert row["variant"] in printed
        assert (row["torch"], row["threads"], row["steps"]) == (torch.__version__, "1", "6")
        assert float(row["step_ms_low"]) <= float(row["step_ms"]) <= float(row["step_ms_high"])
        assert all(row[key] for key in ("cpu", "commit", "backend", "date", "python"))
    with (tmp_path / "training-curves.csv").open(newline="") as file:
        curves = list(csv.DictReader(file))
    assert [(row["step"], row["variant"]) for row in curves] == [
        (str(step), name) for step in range(QUICK.steps) for name in VARIANTS
    ]
    assert all(float(row["loss"]) > 0 and row["commit"] for row in curves)
    assert all((row["norm"] == "") == (row["variant"] == NONE) for row in curves)


def test_a_quick_run_leaves_the_committed_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "RESULTS", tmp_path)
    assert training.main(["--quick", "--threads", "1"]) == 0
    assert "nats apart from torch's" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_no_threads_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        training.main(["--threads", "0"])
    assert stop.value.code == 2
    assert "--threads must be at least 1, got 0" in capsys.readouterr().err
