"""The state in the Trainer's checkpoints: a run that is resumed is the run that was not stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip.integrations.transformers import NAME, GradClipCallback
from fastclip.monitor import JSONL, Monitor
from fastclip.rules import AutoClip
from tests.integrations.trainer import logged, trainer

STEPS, HALF = 24, 12
NAMES = ("loss", "grad_norm", "grad_clip_coef", "grad_clipped", "grad_skipped")


def callback(folder: Path, **options: Any) -> GradClipCallback:
    """With a rule and detectors that remember."""
    monitor = Monitor(sinks=[JSONL(folder / "run.jsonl")])
    rule = AutoClip(percentile=5.0, window=6)
    return GradClipCallback(rule=rule, monitor=monitor, **options)


def run(folder: Path, own: GradClipCallback, resume: Any = None) -> Any:
    options: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": HALF}
    made = trainer(folder, own, **options)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GradClipCallback, Any]:
    """A run that went through; its folder has the checkpoint of the middle."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    own = callback(folder)
    return folder, own, run(folder, own)


def test_the_rest_is_the_same(whole: tuple[Path, GradClipCallback, Any], tmp_path: Path) -> None:
    folder, own, went_through = whole
    shutil.copytree(folder / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}")
    other = callback(tmp_path)
    resumed = run(tmp_path, other, resume=True)
    for name in NAMES:
        assert logged(resumed, name) == logged(went_through, name)
    assert len({*logged(resumed, "grad_clip_coef")[HALF:]}) > 5  # the rule does bind
    assert own.clipper is not None
    assert other.clipper is not None
    state, expected = other.clipper.state_dict(), own.clipper.state_dict()
    for part in ("counters", "state"):
        torch.testing.assert_close(state[part], expected[part], rtol=0, atol=0)
    assert other.monitor is not None
    assert own.monitor is not None
    assert other.monitor.state_dict() == own.monitor.state_dict()
    first, second = (list(JSONL(each / "run.jsonl")) for each in (folder, tmp_path))
    assert second == first[HALF:]


def test_from_another_folder(whole: tuple[Path, GradClipCallback, Any], tmp_path: Path) -> None:
    folder, _, went_through = whole
    checkpoint = folder / f"checkpoint-{HALF}"
    own = callback(tmp_path, resume_from=checkpoint)
    resumed = run(tmp_path, own, resume=str(checkpoint))
    assert logged(resumed, "grad_clip_coef") == logged(went_through, "grad_clip_coef")


def test_without_the_file_it_begins_afresh_and_says_so(
    whole: tuple[Path, GradClipCallback, Any], tmp_path: Path
) -> None:
    folder, _, _ = whole
    shutil.copytree(folder / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}")
    (tmp_path / f"checkpoint-{HALF}" / NAME).unlink()
    own = callback(tmp_path)
    with pytest.warns(UserWarning, match=r"fastclip\.pt is missing, so the clipper"):
        run(tmp_path, own, resume=True)
    assert own.clipper is not None
    assert int(own.clipper.counters()["steps"]) == STEPS - HALF
    missing = callback(tmp_path, resume_from=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no fastclip\.pt to resume from"):
        run(tmp_path, missing, resume=True)
