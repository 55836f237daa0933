"""examples/train.py: the run, its log, going on with it, and the commands over the log."""

import json
import math
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train import tell
from fastclip.cli import main
from fastclip.monitor import JSONL, ClipRate, Event, Monitor
from fastclip.testing.compare import bitwise_equal

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train.py"
STEPS, CUT = 120, 60  # the cut is where rows of layers are due, so that their turn stays the same

pytestmark = pytest.mark.slow


def train(out: Path, steps: int, *options: str) -> None:
    """As a user runs it, on one thread: sums of several are not the same bits every time."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(SCRIPT), "--out", str(out), "--steps", str(steps)]
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stdout
    assert done.stdout.endswith(f"now: fastclip report {out / 'run.jsonl'}\n")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("example") / "whole"
    train(out, STEPS)
    return out


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("example") / "resumed"
    train(out, CUT)
    train(out, STEPS, "--resume")
    return out


def test_the_log_has_every_step(whole: Path) -> None:
    records = list(JSONL(whole / "run.jsonl"))
    assert [record.step for record in records] == list(range(STEPS))
    assert [record.batch for record in records] == list(range(STEPS))
    losses = [record.loss for record in records if record.loss is not None]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert statistics.fmean(losses[-20:]) < 0.7 * statistics.fmean(losses[:20])  # 2.6 and 4.1
    assert [r.step for r in records if r.val_loss is not None] == [99]
    for record in records:
        assert None not in (record.grad_norm, record.clip_coef, record.lr, record.activation_max)
        assert (record.nonfinite_count, record.skipped, record.attempt) == (0, False, 0)


def test_every_twentieth_record_has_layers(whole: Path) -> None:
    records = list(JSONL(whole / "run.jsonl"))
    carriers = [record for record in records if record.layers is not None]
    assert [record.step for record in carriers] == list(range(19, STEPS, 20))
    for record in carriers:
        rows = record.layers or ()
        assert len(rows) == 29
        assert all(None not in row for row in rows)
        squares = math.fsum(row.norm**2 for row in rows if row.norm is not None)
        assert math.sqrt(squares) == pytest.approx(record.grad_norm, rel=1e-5)
        assert record.param_norm is not None
        assert record.update_ratio is not None


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through and through."""
    if isinstance(one, torch.Tensor):
        return bitwise_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_resumed_run_is_the_uninterrupted_one(whole: Path, resumed: Path) -> None:
    saved = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, resumed)]
    assert saved[0]["step"] == STEPS
    assert list(saved[0]) == ["step", "model", "optimizer", "scheduler", "clipper", "monitor"]
    assert same(*saved)
    changed = {**saved[0], "model": {**saved[0]["model"], "norm.bias": torch.zeros(96)}}
    assert not same(saved[0], changed)
    assert (resumed / "run.jsonl").read_bytes() == (whole / "run.jsonl").read_bytes()


def test_the_commands_take_its_log(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(whole / "run.jsonl")
    assert main(["replay", log, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed == {"records": STEPS, "skipped_lines": 0, "events": []}
    assert main(["report", log, "--json"]) == 0
    page = whole / "run.html"
    told = json.loads(capsys.readouterr().out)
    assert told == {"report": str(page), "records": STEPS, "events": 0}
    assert "blocks.0.qkv.weight" in page.read_text(encoding="utf-8")


def test_an_alarm_that_lasts_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    told: set[tuple[str, str]] = set()
    monitor = Monitor([ClipRate()])
    for step in range(300):
        told = tell(monitor.observe(step=step, clipped=not 150 <= step < 250), told)
    printed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["step 99"]
    for step in range(300, 310):
        told = tell([Event(step, "nonfinite", "warn", "loss", 0.0)] if step % 5 else [], told)
    printed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["step 301", "step 306"]


REFUSED = {
    "a-run-is-there": ("run.jsonl", [], "run.jsonl has a run in it: --resume goes on with it"),
    "nothing-to-resume": ("other", ["--resume"], "checkpoint.pt to resume from"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, options, message = REFUSED[case]
    (tmp_path / name).write_text("")
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
