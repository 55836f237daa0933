"""Runs as figures of plotly: plain dictionaries, colours as variables of the page's style."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastclip.monitor.records import LEVELS
from fastclip.monitor.report.run import RATED, Run
from fastclip.monitor.report.text import label, number
from fastclip.monitor.report.thinning import Point, Thinned

Figure = dict[str, Any]

SYMBOLS = {"info": "circle", "warn": "triangle-up", "critical": "diamond"}
TOP, BELOW = 0.95, 0.87  # where in a chart stands what has no place on its axis: values, events
ONSETS, LINES = 300, 60  # onsets that are drawn; if there are more than so many, at the top alone
SPARSE = 60  # points of validation losses up to which each is marked
CLOSE = 0.015  # of the width: a mark so soon after another one is small
CHARACTER = (
    0.015  # of the width at 760 pixels: between numbers of onsets is one more than they have
)


@dataclass(frozen=True)
class Chart:
    """One chart over steps: its series, and whether its axis is logarithmic where it can be."""

    name: str
    title: str
    series: tuple[str, ...]
    log: bool = False
    note: str = ""
    more: bool = False  # stands below the others


CHARTS = (
    Chart("loss", "Loss", ("loss", "val_loss")),
    Chart("grad_norm", "Gradient norm", ("grad_norm",), True, "before clipping"),
    Chart("clip_rate", "Clip rate", ("clip_rate",), note=f"share of the last {RATED} records"),
    Chart("loss_scale", "Loss scale", ("loss_scale",), True),
    Chart("lr", "Learning rate", ("lr",)),
    Chart("activation_max", "Largest activation", ("activation_max",), True, more=True),
    Chart("param_norm", "Parameter norm", ("param_norm",), note="after the update", more=True),
    Chart("update_ratio", "Update ratio", ("update_ratio",), True, "update over parameter", True),
)
WORDS = {
    **{"val_loss": "validation loss", "grad_norm": "norm", "lr": "learning rate"},
    **{"activation_max": "largest activation", "param_norm": "parameter norm"},
}
# Ticks of a decade or more at 1, 2 and 5, each with its whole number.
LOG_TICKS = {"nticks": 3, "tickformat": ".3~g"}
SPREAD = 30  # from this ratio of the largest to the median value on, a loss is drawn in log


def charts(runs: Sequence[Run]) -> list[tuple[Chart, Figure]]:
    """The charts that any of the runs has values for."""
    return [(chart, _figure(chart, runs)) for chart in CHARTS if _present(chart, runs)]


def _present(chart: Chart, runs: Sequence[Run]) -> bool:
    return any(name in run.series or name in run.lost for run in runs for name in chart.series)


def _figure(chart: Chart, runs: Sequence[Run]) -> Figure:
    places = reversed(range(len(runs)))  # the first run on top
    data = [trace for place in places for trace in _traces(chart, place, runs)]
    values = [y for trace in data if trace["mode"] == "lines" for y in trace["y"] if y is not None]
    values = values or [y for trace in data if trace["yaxis"] == "y" for y in trace["y"] if y]
    positive = bool(values) and min(values) > 0
    log = positive and (chart.log or (chart.name == "loss" and _spread(values) > SPREAD))
    yaxis: Figure = {"type": "log" if log else "linear", "automargin": True}
    if chart.name == "clip_rate":
        yaxis |= {"range": [-0.03, 1.1], "tickformat": ".0%"}
    elif chart.name == "loss_scale" and log:
        yaxis |= _powers_of_two(min(values), max(values))
    elif log:
        yaxis |= LOG_TICKS
    else:
        yaxis |= {"exponentformat": "power"}
    low, high = min(run.first for run in runs), max(run.last for run in runs)
    pad = 0.02 * (high - low) or 0.5
    shapes, annotations = _onsets(runs, high - low)
    layout = {
        "xaxis": {"type": "linear", "range": [low - pad, high + pad], "title": {"text": "step"}},
        "yaxis": yaxis,
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
        "shapes": shapes,
        "annotations": annotations,
        # What the page offers a switch for.
        "meta": {
            "steps": True,
            "log": LOG_TICKS
            if positive and chart.name not in ("clip_rate", "loss_scale")
            else None,
        },
    }
    return {"data": data, "layout": layout}


def _spread(values: Sequence[float]) -> float:
    return max(values) / sorted(values)[len(values) // 2]


def _powers_of_two(low: float, high: float) -> Figure:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    stride = max(1, math.ceil((last - first) / 6))
    powers = range(first, min(last, sys.float_info.max_exp - 1) + 1, stride)
    return {
        "tickvals": [2.0**power for power in powers],
        "ticktext": [f"2<sup>{power}</sup>" for power in powers],
        "range": [math.log10(2) * (first - 0.6), math.log10(2) * (last + 0.9)],
    }


def _traces(chart: Chart, place: int, runs: Sequence[Run]) -> list[Figure]:
    """Of one run: lines, validation losses, what was abandoned, marks of events and of faults."""
    run, color = runs[place], f"var(--run{place + 1})"
    several = len(runs) > 1
    found = []
    for name in chart.series:
        if name in run.series:
            points = run.series[name].points()
            lines = [True, False] if len(run.attempts) > 1 else [False]
            for abandoned in lines:
                found.append(_line(name, run, points, color, abandoned, several))
    if chart.name == ("loss_scale" if "loss_scale" in run.series else "grad_norm"):
        found.append(_marks(run, run.updates_left_out, "step skipped", "line-ns-open", "fg"))
        found[-1] |= {"y": [1 - TOP for _ in found[-1]["x"]], "yaxis": "y2"}
    for level in LEVELS:
        key = (chart.name, level)
        for marks, top in ((run.marks, False), (run.topped, True)):
            if key in marks:
                valued = "" if top else chart.name
                found.append(_marks(run, marks[key], level, SYMBOLS[level], level, valued))
                if top:
                    found[-1] |= {"y": [BELOW for _ in found[-1]["x"]], "yaxis": "y2"}
    for name in chart.series:
        if name in run.lost:
            found.append(_marks(run, run.lost[name], _word(name), "x-thin-open", "fg"))
            found[-1] |= {"y": [TOP for _ in found[-1]["x"]], "yaxis": "y2"}
    return [trace for trace in found if trace["x"]]


def _word(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _line(
    name: str, run: Run, points: Iterable[Point], color: str, abandoned: bool, several: bool
) -> Figure:
    """Of the points that are in force at the end, or of those that were rolled back."""
    several_attempts = len(run.attempts) > 1
    rows: list[tuple[int | None, float | None, int | None]] = []
    for step, attempt, value, _ in points:
        if several_attempts and run.abandoned(step, attempt) != abandoned:
            continue
        if abandoned and rows and rows[-1][2] != attempt:
            rows.append((None, None, None))
        rows.append((step, _rounded(value), attempt))
    x, y, attempts = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    form = ".1%" if name == "clip_rate" else ".6~g"
    attempt_text = ", attempt %{customdata}" if several_attempts else ""
    rolled = " (rolled back)" if abandoned else ""
    validation = name == "val_loss"
    dash = "dot" if abandoned else ("dash" if validation else "solid")
    trace: Figure = {
        **{"type": "scatter", "mode": "lines", "x": x, "y": y, "yaxis": "y"},
        "name": label(run.name),
        "line": {"color": color, "width": 1.2 if abandoned else 1.6, "dash": dash},
        "opacity": 0.75 if abandoned else 1,
        "hovertemplate": f"step %{{x:,}}{attempt_text}<br>"
        f"{_word(name)} <b>%{{y:{form}}}</b>{rolled}"
        + ("<extra>%{fullData.name}</extra>" if several else "<extra></extra>"),
    }
    if several_attempts:
        trace["customdata"] = attempts
    if validation and len(x) <= SPARSE:
        trace |= {"mode": "lines+markers", "marker": {"color": color, "size": 5}}
    return trace


def _marks(
    run: Run, marks: Thinned, what: str, symbol: str, color: str, valued: str = ""
) -> Figure:
    """Marks with their labels, which have the values too where these are of the metric `valued`."""
    points = marks.points()
    near = CLOSE * (run.last - run.first)
    steps = [-math.inf, *(point.step for point in points)]
    first = [not 0 <= step - before <= near for before, step in pairwise(steps)]
    size = {"line-ns-open": 8, "x-thin-open": 9}.get(symbol)
    outline = "var(--card)" if symbol in SYMBOLS.values() else f"var(--{color})"
    width = 1 if symbol in SYMBOLS.values() else 2
    texts = [
        f"step {point.step:,}"
        + (f", attempt {point.attempt}" if len(run.attempts) > 1 else "")
        + f"<br>{what}"
        + (f": {label(point.note)}" if point.note else "")
        + (f"<br>{_word(valued)} <b>{number(point.value)}</b>" if valued else "")
        for point in points
    ]
    return {
        **{"type": "scatter", "mode": "markers", "yaxis": "y", "name": label(run.name)},
        "x": [point.step for point in points],
        "y": [_rounded(point.value) for point in points],
        "marker": {
            **{"symbol": symbol, "color": f"var(--{color})"},
            "size": size or [11 if alone else 6 for alone in first],
            "opacity": 1,
            "line": {"width": width, "color": outline},
        },
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _onsets(runs: Sequence[Run], width: int) -> tuple[list[Figure], list[Figure]]:
    """A line for each incident's onset, and its number in the table where there is room."""
    shapes, notes = [], []
    for place, run in enumerate(runs):
        told = -math.inf
        run_name = "AB"[place] if len(runs) > 1 else ""
        apart = CHARACTER * (len(f"{run_name}{len(run.episodes)}") + 1) * width
        chosen = sorted(run.shown(ONSETS), key=lambda one: one[1].onset)
        bottom = 0 if len(chosen) <= LINES else TOP
        for order, episode in chosen:
            onset = episode.onset
            color = (
                f"var(--run{place + 1})" if len(runs) > 1 else f"var(--{episode.incident.level})"
            )
            shapes.append(
                {
                    **{"type": "line", "x0": onset, "x1": onset, "y0": bottom, "y1": 1},
                    **{"xref": "x", "yref": "y domain", "layer": "below"},
                    "line": {"color": color, "width": 1, "dash": "dash"},
                }
            )
            if onset - told >= apart:
                told = onset
                notes.append(
                    {
                        **{"x": onset, "xref": "x", "y": 1 - 0.1 * place, "yref": "y domain"},
                        **{"text": f"{run_name}{order}", "showarrow": False, "yanchor": "bottom"},
                        "font": {"color": color},
                    }
                )
    return shapes, notes


def _rounded(value: float) -> float:
    """To six digits: more cannot be seen, and they fill the page."""
    return float(f"{value:.6g}")
