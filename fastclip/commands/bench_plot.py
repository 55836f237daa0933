"""The picture of `fastclip bench --plot`. Needs matplotlib, imported only here and late."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastclip.benchmarking import report
from fastclip.benchmarking.measure import Spread
from fastclip.benchmarking.runner import Result
from fastclip.commands import InputError
from fastclip.commands.bench_table import ratios

FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which the colour-blind tell apart.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000"]
APART = 0.14  # rows between the points of two rivals


def require(path: Path) -> None:
    """Before anything is measured: whether a picture could be written."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot {path} must end in one of {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, of the extra bench: pip install 'torch-fastclip[bench]'"
        )


def write(path: Path, run: report.Run) -> None:
    """Draws all rows of a run into a file."""
    results = [result for result in run.results if isinstance(result, Result)]
    here = run.machine
    draw(results, f"{here.cpu}, {here.threads} threads, torch {here.torch}").savefig(path, dpi=150)


def draw(results: Sequence[Result], title: str) -> Any:
    """Per row and rival the ratio of times, with the range from the 20th to the 80th percentile."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8, 1.8 + 0.3 * len(results)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for result in results for name in ratios(result)))
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        lower = APART * (number - (len(names) - 1) / 2)
        _points(axes, [ratios(result).get(name) for result in results], lower, name, colour)
    for row in range(0, len(results), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0)
    axes.axvline(1.0, color="#555555", linewidth=1.0)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 2.0))  # so that there are three ticks at least
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_yticks(range(len(results)), [result.title for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "time over fastclip's (right of 1 fastclip is faster)\n"
        "dots: medians; bars: from the 20th to the 80th percentile",
        fontsize=8,
    )
    axes.set_title(title, fontsize=9)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    return figure


def _points(
    axes: Any, found: Sequence[Spread | None], lower: float, name: str, colour: str
) -> None:
    """One rival's; `lower` is how far below the middle of its row each point lies."""
    points = [(at + lower, ratio) for at, ratio in enumerate(found) if ratio is not None]
    below = [ratio.median - ratio.low for _, ratio in points]
    above = [ratio.high - ratio.median for _, ratio in points]
    axes.errorbar(
        [ratio.median for _, ratio in points],
        [at for at, _ in points],
        xerr=[below, above],
        fmt="o",
        markersize=5,
        color=colour,
        label=name,
    )
