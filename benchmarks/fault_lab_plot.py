"""`python -m benchmarks.fault_lab_plot`: docs/fault-lab.svg from results/fault-lab*.csv alone.

Needs matplotlib (the extra ``bench``) and not torch. `python -m examples.fault_lab --seeds 10
--csv benchmarks/results/fault-lab.csv --curves benchmarks/results/fault-lab-curves.csv` writes
what is drawn.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import style

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PICTURE = HERE.parent / "docs" / "fault-lab.svg"
SHOWN = 60  # steps before the injection; what is earlier is the same in all runs
LIMITS = (1.7, 6.0)  # nats per character
CLEAN = {
    "fp16-overflow": "none-fp16",
    "dying-loss-scale": "none-fp16",
    "poisoned-rank": "none-ranks",
}


class Case(NamedTuple):
    """A fault in the first seed: losses of each attempt by step, and the steps of what happened."""

    attempts: dict[int, list[tuple[int, float]]]
    clean: list[tuple[int, float]]
    injected: int
    alarm: int
    decided: int | None
    target: int | None


def read(outcomes: Path, curves: Path) -> dict[str, Case]:
    lines: dict[str, dict[int, list[tuple[int, float]]]] = {}
    with curves.open(newline="") as file:
        for row in csv.DictReader(file):
            attempts = lines.setdefault(row["fault"], {})
            point = (int(row["step"]), float(row["loss"]))
            attempts.setdefault(int(row["attempt"]), []).append(point)
    found = {}
    with outcomes.open(newline="") as file:
        for row in csv.DictReader(file):
            name = row["fault"]
            if row["seed"] != "0" or name.startswith("none"):
                continue
            found[name] = Case(
                lines[name],
                lines[CLEAN.get(name, "none")][0],
                *(int(row["injected"]), int(row["detected"])),
                *(int(row[key]) if row[key] else None for key in ("decided", "target")),
            )
    return found


def draw(cases: dict[str, Case]) -> Any:
    """A panel per fault."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(style.SETTINGS)
    from matplotlib import pyplot

    rows = (len(cases) + 2) // 2
    figure, grid = pyplot.subplots(
        rows, 2, figsize=(style.WIDTH, 1.9 * rows), layout="constrained", sharex=True, sharey=True
    )
    panels = list(grid.flat)
    for axes, (name, case) in zip(panels, cases.items(), strict=False):
        _panel(axes, name, case)
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    panels[len(cases)].legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="center")
    for axes in panels[len(cases) - 2 : len(cases)]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    figure.supylabel("training loss (nats per character)", fontsize=style.NORMAL)
    return figure


def _panel(axes: Any, name: str, case: Case) -> None:
    axes.grid(axis="y", **style.GRID)
    axes.set_title(name, loc="left")
    axes.axvline(case.injected, color=style.MUTED, linewidth=0.8, linestyle=":", label="injection")
    axes.plot(*_points(case.clean, case), color=style.MUTED, linewidth=0.8, label="without a fault")
    kept, undone = _sorted_out(case)
    if undone:
        axes.plot(*_points(undone, case), color=style.VERMILION, linewidth=1.2, label="rolled back")
    axes.plot(*_points(kept, case), color=style.BLUE, linewidth=1.2, label="what was kept")
    loss = dict(case.attempts[0]).get(case.alarm, LIMITS[1])
    height = (
        loss if LIMITS[0] <= loss <= LIMITS[1] else LIMITS[1]
    )  # beyond, or not finite: at the top
    axes.plot(
        [case.alarm],
        [height],
        color=style.VERMILION,
        marker="o",
        linestyle="",
        clip_on=False,
        label="first alarm",
    )
    axes.set_ylim(*LIMITS)
    axes.text(
        0.98,
        0.9,
        _said(case),
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=style.SMALL,
        color=style.MUTED,
    )


def _sorted_out(case: Case) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """The losses of the steps that count in the end, and of those that do not."""
    if case.target is None:
        return case.attempts[0], []
    before = [point for point in case.attempts[0] if point[0] < case.target]
    return before + case.attempts[1], case.attempts[0][len(before) :]


def _said(case: Case) -> str:
    if case.decided is None:
        return "step skipped"
    return (
        f"alarm at +{case.alarm - case.injected}\nrolled back from {case.decided} to {case.target}"
    )


def _points(points: Sequence[tuple[int, float]], case: Case) -> tuple[list[int], list[float]]:
    shown = [point for point in points if point[0] >= case.injected - SHOWN]
    return [step for step, _ in shown], [loss for _, loss in shown]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fault_lab_plot",
        description="The picture in docs/fault-lab.md, from the CSVs.",
    )
    parser.add_argument("--csv", type=Path, default=RESULTS / "fault-lab.csv", metavar="PATH")
    parser.add_argument(
        "--curves", type=Path, default=RESULTS / "fault-lab-curves.csv", metavar="PATH"
    )
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="PATH", help="svg or png")
    options = parser.parse_args(arguments)
    for path in (options.csv, options.curves):
        if not path.is_file():
            parser.error(f"{path} does not exist: python -m examples.fault_lab writes it")
    style.save(draw(read(options.csv, options.curves)), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
