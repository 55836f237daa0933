"""What docs/half-precision.md shows of the demo, of torch's number formats and in its picture."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import half_precision_plot
from fastclip.commands import demo, demo_experiment

PAGE = (Path(__file__).parents[1] / "docs" / "half-precision.md").read_text(encoding="utf-8")


def test_the_table_of_the_demo_is_what_the_demo_prints() -> None:
    rows = [row for mode in demo_experiment.MODES for row in demo_experiment.run(mode)]
    lines = demo.experiment_text(rows).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("mode "))
    assert "\n".join(lines[head : head + 10]) in PAGE


@pytest.mark.parametrize(
    ("row", "measure"),
    [
        ("largest number", lambda dtype: torch.finfo(dtype).max),
        ("smallest normal number", lambda dtype: torch.finfo(dtype).smallest_normal),
        (
            "smallest number over 0",
            lambda dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
        ),
        ("distance from 1 to the next", lambda dtype: torch.finfo(dtype).eps),
    ],
)
def test_the_table_of_formats_is_torchs(row: str, measure: Callable[[torch.dtype], float]) -> None:
    found = re.search(rf"^\| {row} \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    assert found is not None
    shown = [float(number.replace(",", "")) for number in found.groups()]
    formats = (torch.float32, torch.bfloat16, torch.float16)
    assert shown == pytest.approx([measure(dtype) for dtype in formats], rel=0.05)


def test_the_picture_shows_what_is_said_of_it() -> None:
    layers = half_precision_plot.magnitudes()
    assert len(layers) == 8
    assert layers[0][-1] < half_precision_plot.SMALLEST  # 99 % of the first layer become 0
    scaled = [half_precision_plot.SCALE * value for layer in layers for value in layer]
    assert half_precision_plot.SMALLEST < min(scaled)
    assert max(scaled) < half_precision_plot.LARGEST


def test_the_committed_picture_is_that_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    assert half_precision_plot.main(["--out", str(tmp_path / "again.svg")]) == 0
    drawn = (tmp_path / "again.svg").read_text()
    assert drawn.count("<path") == half_precision_plot.PICTURE.read_text().count("<path")
    assert "(half-precision.svg)" in PAGE
