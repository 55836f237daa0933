"""What docs/half-precision.md shows of the demo, of torch's number formats and in its picture, and
what docs/clipper.md says of torch's fused SGD in half precision.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

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


def _stepped(optimizer: Callable[..., Optimizer], elements: int, dtype: torch.dtype) -> list[float]:
    """Parameters of 1.0 after a step of plain torch with a gradient of 0.25."""
    parameter = nn.Parameter(torch.ones(elements, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 0.25)
    optimizer([parameter], lr=1.0).step()
    return parameter.tolist()


@pytest.mark.skipif(
    not str(torch.__version__).startswith("2.13.0"), reason="the page says it of torch 2.13.0"
)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_sgd_is_as_the_limits_say(dtype: torch.dtype, momentum: float) -> None:
    """Strict, so that it is noticed when torch mends it."""
    sgd = partial(torch.optim.SGD, momentum=momentum)
    fused, foreach = partial(sgd, fused=True), partial(sgd, foreach=True)
    assert _stepped(fused, 6, dtype) == [0.75] * 6
    assert _stepped(fused, 15, dtype) == [0.75] * 15
    assert _stepped(fused, 16, dtype) == [1.0] * 16
    assert _stepped(fused, 48, dtype) == [1.0] * 48
    assert _stepped(fused, 50, dtype) == [1.0] * 48 + [0.75] * 2
    assert _stepped(foreach, 50, dtype) == [0.75] * 50
    assert _stepped(fused, 50, torch.float32) == [0.75] * 50


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_fused_optimizers_update_all_elements(
    dtype: torch.dtype, optimizer: Callable[..., Optimizer]
) -> None:
    eps: dict[str, Any] = {"eps": 1e-4}  # the default is 0 in float16
    fused, foreach = partial(optimizer, fused=True, **eps), partial(optimizer, foreach=True, **eps)
    found, expected = (_stepped(each, 50, dtype) for each in (fused, foreach))
    assert found == pytest.approx(expected, abs=torch.finfo(dtype).eps)
    assert max(found) < 0.1  # a step of lr
