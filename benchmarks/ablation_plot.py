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
LAST_CLOSE_UP = 40  # steps after the event


class Curve(NamedTuple):
    """Losses by step from the event: the median of all seeds, and the least and most."""

    steps: list[int]
    low: list[float]
    median: list[float]
    high: list[float]


def read(path: Path) -> dict[str, Curve]:
    """The curve of each rule, the one without clipping first."""
    found: dict[str, Curve] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            curve = found.setdefault(row["rule"], Curve([], [], [], []))
            curve.steps.append(int(row["step"]))
            for values, name in (
                (curve.low, "low"),
                (curve.median, "median"),
                (curve.high, "high"),
            ):
                values.append(float(row[name]))
    return found


def draw(curves: dict[str, Curve]) -> Any:
    """The figure: all runs, and beside it those that clip from nearer."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastclip"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for number, (rule, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        left.plot(curve.steps, curve.median, color=colour, linewidth=1.4, label=rule)
        if number == 0:
            left.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.12, lw=0)
            continue
        shown = [place for place, step in enumerate(curve.steps) if step <= LAST_CLOSE_UP]
        steps, losses = ([values[at] for at in shown] for values in (curve.steps, curve.median))
        right.plot(steps, losses, color=colour, linewidth=1.4)
    left.set_title("All runs (grey: all seeds without clipping)", fontsize=10)
    right.set_title("The rules from nearer", fontsize=10)
    for axes in (left, right):
        axes.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel("steps after the corrupted batch")
        axes.set_ylabel("validation loss (nats per character)")
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
