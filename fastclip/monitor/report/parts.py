"""The pieces that sections are made of: a chart in its frame, the key, the signs of the levels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastclip.monitor.records import LEVELS, Level
from fastclip.monitor.report.figures import WORDS, Chart, Figure
from fastclip.monitor.report.run import Run
from fastclip.monitor.report.text import count, escape, number

# As plotly draws them, in a box of 12 by 12.
SIGNS = {
    "info": '<circle cx="6" cy="6" r="5"/>',
    "warn": '<path d="M6 1 11.5 11H.5z"/>',
    "critical": '<path d="M6 0 12 6 6 12 0 6z"/>',
}


@dataclass
class Page:
    """What the sections of a page leave for its script."""

    figures: list[dict[str, Any]] = field(default_factory=list)


def block(made: Page, identifier: str, title: str, note: str, figure: Figure, summary: str) -> str:
    """A chart under its heading; `summary` (plain text) says in words what it shows."""
    made.figures.append({"id": identifier, **figure})
    pressed = str(figure["layout"]["yaxis"]["type"] == "log").lower()
    button = (
        f'<button type="button" data-log="{identifier}" aria-pressed="{pressed}" '
        f'aria-label="logarithmic axis: {escape(title)}" hidden>log</button>'
        if figure["layout"]["meta"].get("log")
        else ""
    )
    told = escape(summary, 1000)
    return (
        f'<figure><div class="head"><h3>{escape(title)}</h3><span>{escape(note)}</span>{button}'
        f'</div><div class="plot" id="{identifier}" role="img" '
        f'aria-label="{escape(title)}. {told}"></div><figcaption>{told}</figcaption></figure>'
    )


def summary(chart: Chart, runs: Sequence[Run]) -> str:
    """Range and last value of each series, and what is not finite."""
    told = []
    several = len(runs) > 1
    for run in runs:
        whose = f"{run.name}: " if several else ""
        for name in chart.series:
            what = WORDS.get(name, name.replace("_", " "))
            if name in run.series:
                points = run.series[name].points()
                low = min(points, key=lambda point: point.value)
                high = max(points, key=lambda point: point.value)
                shown = _percent if name == "clip_rate" else number
                span = (
                    f"{what} from {shown(low.value)} (step {low.step}) to {shown(high.value)} "
                    f"(step {high.step}), at last {shown(points[-1].value)}"
                    if low.value < high.value
                    else f"{what} {shown(low.value)} throughout"
                )
                told.append(f"{whose}{span}.")
            if name in run.lost:
                told.append(f"{whose}{what} not finite in {count(run.lost[name].count, 'record')}.")
    return " ".join(told if several else [f"{text[0].upper()}{text[1:]}" for text in told])


def _percent(value: float) -> str:
    return f"{value:.1%}"


def sign(level: Level) -> str:
    return (
        f'<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true" fill="var(--{level})">'
        f"{SIGNS[level]}</svg>"
    )


def key(runs: Sequence[Run]) -> str:
    """What lines and marks mean, of those that occur."""
    parts = []
    if len(runs) > 1:
        parts += [
            f'<span class="dot run{place}"></span>{escape(run.name)}'
            for place, run in enumerate(runs, 1)
        ]
    color = "var(--run1)" if len(runs) == 1 else "var(--muted)"
    if any(len(run.attempts) > 1 for run in runs):
        parts.append(f"{_stroke(color, '2 3')}rolled back")
    if any("val_loss" in run.series for run in runs):
        parts.append(f"{_stroke(color, '7 4')}validation")
    present = [level for level in LEVELS if any(run.levels[level] for run in runs)]
    parts += [f"{sign(level)}{level}" for level in present]
    if present:
        parts.append(f"{_stroke('var(--muted)', '5 3', upright=True)}onset of an incident")
    if any(run.lost for run in runs):
        cross = '<path d="M1 1 11 11M11 1 1 11" stroke="var(--fg)" stroke-width="2"/>'
        parts.append(f"{_svg(12, cross)}not finite")
    if any(run.skipped for run in runs):
        tick = '<path d="M6 1V11" stroke="var(--fg)" stroke-width="2"/>'
        parts.append(f"{_svg(12, tick)}step skipped")
    items = "".join(f"<li>{part}</li>" for part in parts)
    return f'<ul class="key">{items}</ul>' if parts else ""


def _stroke(color: str, dashes: str, upright: bool = False) -> str:
    path = "M6 0V12" if upright else "M0 6H26"
    drawn = f'<path d="{path}" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'
    return _svg(12 if upright else 26, drawn)


def _svg(width: int, drawn: str) -> str:
    box = f'width="{width}" height="12" viewBox="0 0 {width} 12"'
    return f'<svg {box} aria-hidden="true">{drawn}</svg>'
