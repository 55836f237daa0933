"""`python -m benchmarks.ablation_plot`: docs/ablation.svg from results/ablation-curves.csv alone.

Needs matplotlib (the extra ``bench``) and not torch.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
CURVES = HERE / "results" / "ablation-curves.csv"
PICTURE = HERE.parent / "docs" / "ablation.svg"

# Okabe and Ito's colours, which the colour-blind tell apart; black for the run without a rule.
COLOURS = ["#000000", "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"]
STYLES = ["-", "-", "-", "-", "--", "-", "-"]  # ZClip lies on MaxNorm
LAST_CLOSE_UP = 40  # steps after the event
CLOSE_UP = (-0.02, 0.12)  # nats; the run without a rule leaves the panel


class Curve(NamedTuple):
    """Losses by step from the event: least, median and most of all seeds; and the median of what
    they are over those with a sound batch."""

    steps: list[int]
    low: list[float]
    median: list[float]
    high: list[float]
    excess: list[float]


def read(path: Path) -> dict[str, Curve]:
    """The curve of each rule, the one without clipping first."""
    found: dict[str, Curve] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            curve = found.setdefault(row["rule"], Curve([], [], [], [], []))
            curve.steps.append(int(row["step"]))
            for name in ("low", "median", "high", "excess"):
                getattr(curve, name).append(float(row[name]))
    return found


def draw(curves: dict[str, Curve]) -> Any:
    """The figure: losses, and beside it what the corrupted batch did to them."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastclip"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    styles = zip(COLOURS, STYLES, strict=True)
    for (rule, curve), (colour, style) in zip(curves.items(), styles, strict=True):
        look = {"color": colour, "linestyle": style, "linewidth": 1.4}
        left.plot(curve.steps, curve.median, label=rule, **look)
        shown = [place for place, step in enumerate(curve.steps) if step <= LAST_CLOSE_UP]
        steps, excess = ([values[at] for at in shown] for values in (curve.steps, curve.excess))
        right.plot(steps, excess, **look)
    first = next(iter(curves.values()))
    left.fill_between(first.steps, first.low, first.high, color=COLOURS[0], alpha=0.12, linewidth=0)
    left.set_title("Median of the seeds (grey: all seeds without clipping)", fontsize=10)
    left.set_ylabel("validation loss (nats per character)")
    right.set_title("Against the same run with a sound batch", fontsize=10)
    right.set_ylabel("additional validation loss (nats per character)")
    right.set_xlim(-5, LAST_CLOSE_UP)
    right.set_ylim(*CLOSE_UP)
    for axes in (left, right):
        axes.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel("steps after the corrupted batch")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    left.legend(frameon=False, fontsize=9)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation_plot",
        description="The picture in docs/clipping-rules.md, from the CSV.",
    )
    parser.add_argument("--csv", type=Path, default=CURVES, metavar="PATH")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="PATH", help="svg or png")
    args = parser.parse_args(arguments)
    if not args.csv.is_file():
        parser.error(f"{args.csv} does not exist: python -m benchmarks.ablation writes it")
    dated = {"metadata": {"Date": None}} if args.out.suffix == ".svg" else {}
    draw(read(args.csv)).savefig(args.out, dpi=150, **dated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
