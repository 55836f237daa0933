"""`python -m benchmarks.half_precision_plot`: docs/half-precision.svg, of the network on that page.

Needs matplotlib (the extra ``bench``) and torch. The same numbers come of it every time, up to the
rounding of the machine, which is finer than the picture.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import style

PICTURE = Path(__file__).parents[1] / "docs" / "half-precision.svg"
SCALE = 65_536.0  # where a GradScaler begins
SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
LARGEST, NORMAL, SMALLEST = 65_504.0, 2.0**-14, 2.0**-24  # what fp16 holds
LIMITS = (1e-13, 1e7)


def magnitudes() -> list[Sequence[float]]:
    """Of the weights' gradients in float32, first layer first: the quantiles `SHARES` of abs(x)."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    inputs, targets = torch.randn(256, 64), torch.randint(10, (256,))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    found: list[Sequence[float]] = []
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.weight.grad is not None:
            found.append(layer.weight.grad.abs().quantile(torch.tensor(SHARES)).tolist())
    return found


def draw(layers: Sequence[Sequence[float]]) -> Any:
    """A panel for the gradients as they are, and one for those multiplied by the loss scale."""
    figure, panels = style.panels(2, 3.0)
    titles = ("without a loss scale", f"with a loss scale of {SCALE:,.0f}")
    for axes, factor, title in zip(panels, (1.0, SCALE), titles, strict=True):
        axes.set_title(title, loc="left")
        axes.set_xscale("log")
        axes.set_xlim(*LIMITS)
        _range(axes)
        for place, shares in enumerate(layers):
            low, first, middle, third, high = (factor * value for value in shares)
            axes.plot([low, high], [place, place], color=style.BLUE, linewidth=1.2)
            axes.plot([first, third], [place, place], color=style.BLUE, linewidth=6)
            axes.plot([middle], [place], color="white", marker="|", markersize=6)
        axes.set_xlabel("magnitude of the gradient's elements")
    panels[0].set_yticks(range(len(layers)), [f"{2 * n}.weight" for n in range(len(layers))])
    panels[0].invert_yaxis()
    return figure


def _range(axes: Any) -> None:
    """What fp16 makes of a magnitude: grey where it is lost, orange where digits are."""
    low, high = LIMITS
    shades = (
        (low, SMALLEST, "#eaeef2", "becomes 0"),
        (SMALLEST, NORMAL, "#fdf0d5", "loses\ndigits"),
        (NORMAL, LARGEST, "white", "held by fp16"),
        (LARGEST, high, "#eaeef2", "inf"),
    )
    for start, end, colour, text in shades:
        axes.axvspan(start, end, color=colour, zorder=0, linewidth=0)
        axes.text(
            (start * end) ** 0.5,
            -0.75,
            text,
            ha="center",
            va="center",
            fontsize=style.SMALL,
            color=style.MUTED,
        )
    axes.set_ylim(-1.3, 7.6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half_precision_plot",
        description="The picture in docs/half-precision.md.",
    )
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="PATH", help="svg or png")
    style.save(draw(magnitudes()), parser.parse_args(arguments).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
