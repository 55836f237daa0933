"""How the pictures look: readable at the width of a README (830 px) on a light page and a dark one,
told apart by the colour-blind, and the same bytes for the same numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.records import Row

WIDTH = 8.6  # inches: 825 px in an SVG
SMALL, NORMAL = 8, 9  # points: 11 and 12 px
TEXT, MUTED = "#1f2328", "#59636e"

# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#e69f00",
    "#cc79a7",
    "#56b4e9",
)
SIDES = {
    "fastclip": BLUE,
    "fastclip-triton": BLUE,
    "fastclip-cuda": SKY,
    "torch": VERMILION,
    "apex": GREEN,
    "transformer_engine": PURPLE,
}
HOLLOW = ("fastclip-cuda",)  # beside the other backend of the same dtype


class Dtype(NamedTuple):
    """Its colour, and its place within the line of a workload."""

    colour: str
    offset: float


DTYPES = {
    "float32": Dtype(BLUE, -0.27),
    "bfloat16": Dtype(ORANGE, -0.09),
    "float16": Dtype(GREEN, 0.09),
    "mixed": Dtype(PURPLE, 0.27),
}
VARIANTS = (MUTED, VERMILION, SKY, BLUE)
DASHES = ("-", "-", "-", "--")
LIMIT = {"color": MUTED, "linestyle": "--", "linewidth": 1.2}
GRID = {"color": "#d8dee4", "linewidth": 0.6}

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fastclip",  # identifiers that do not change from run to run
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.labelsize": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "text.color": TEXT,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "figure.facecolor": "white",  # opaque: a dark page would swallow the text
}


def panels(count: int, height: float, share_y: bool = True) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes side by side."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(SETTINGS)
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, count, figsize=(WIDTH, height), layout="constrained", sharey=share_y, squeeze=False
    )
    for one in axes[0]:
        one.grid(axis="y", **GRID)
    return figure, list(axes[0])


def colour(side: str) -> str:
    return SIDES[side]


def byte_axis(axes: Any) -> None:
    """Powers of 2 with their units, every 32-fold."""
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    names = ("KiB", "KiB", "MiB", "MiB", "GiB")
    ticks = [
        (1 << n, f"{1 << n % 10} {unit}") for n, unit in zip(range(10, 35, 5), names, strict=True)
    ]
    shown = [(at, name) for at, name in ticks if low <= at <= high]
    axes.set_xticks([at for at, _ in shown], [name for _, name in shown])
    axes.minorticks_off()


def ratio_axis(axes: Sequence[Any], low: float, high: float) -> float:
    """Powers of 2, the same on all `axes`; where torch is faster is grey. Returns the end."""
    low, high = min(0.45, low * 0.9), max(4.5, high * 1.5)
    ticks = [2.0**n for n in range(-6, 12) if low <= 2.0**n <= high]
    for one in axes:
        one.set_xlim(low, high)
        one.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        one.minorticks_off()
        one.axvspan(low, 1, color="#eaeef2", zorder=0, linewidth=0)
        one.text(
            low * 1.03,
            0.01,
            "torch is faster",
            transform=one.get_xaxis_transform(),
            fontsize=SMALL,
            color=MUTED,
            rotation=90,
            horizontalalignment="left",
            verticalalignment="bottom",
        )
    return high


def ratio_legend(figure: Any, dtypes: Sequence[str], sides: Sequence[str], limits: bool) -> None:
    """Above the panels: the dtypes, the backends where there are two, and the tick if there are."""
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=DTYPES[name].colour, marker="o", markersize=5, label=name)
        for name in dtypes
    ]
    if len(sides) > 1:
        marks += [
            Line2D(
                [],
                [],
                color=MUTED,
                linestyle="",
                marker="o",
                markersize=5,
                markerfacecolor="white" if side in HOLLOW else MUTED,
                label=side,
            )
            for side in sides
        ]
    if limits:
        limit = "what memory allows (arrow: beyond)"
        marks.append(
            Line2D([], [], color=MUTED, linestyle="", marker="|", markersize=8, label=limit)
        )
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), frameon=False)


def plain_log(axes: Any) -> None:
    """Both axes logarithmic, their numbers written out."""
    for set_scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
        set_scale("log")
        axis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()


def legend(axes: Any, loc: str) -> None:
    axes.legend(frameon=True, framealpha=0.85, edgecolor="none", loc=loc)


def caption(figure: Any, rows: Sequence[Row], marks: str) -> None:
    """What the marks are; where and when: machine, versions, commit and day of the rows."""
    text = f"{marks}\n{about(rows)}"
    figure.supxlabel(text, fontsize=7, color=MUTED, x=0.99, ha="right", multialignment="right")


def about(rows: Sequence[Row]) -> str:
    """All machines, versions and commits that the rows are of, and from which day to which."""

    def of(name: str) -> str:
        return " / ".join(dict.fromkeys(row[name] for row in rows))

    if "card" in rows[0]:
        machine = of("card")
    else:
        cache = of("last_level_cache").replace("32768K", "32 MiB")
        machine = (
            f"{of('cpu')}, {of('cores')} cores, {cache}, {of('simd')}, {of('threads')} threads"
        )
    days = sorted({row["date"][:10] for row in rows})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{machine}; torch {of('torch')}, commit {of('commit')}, {when}"


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=96, **dated)
    pyplot.close(figure)
