"""The heat maps of layers, with what they show in words."""

from collections.abc import Sequence

from fastclip.monitor.report.figures import Figure
from fastclip.monitor.report.heatmaps import ROWS, Layers, layers, lowest
from fastclip.monitor.report.parts import Page, block
from fastclip.monitor.report.run import Run
from fastclip.monitor.report.text import count, listed

ATTEMPTS = " A number in parentheses after a step is its attempt."


def layers_section(made: Page, runs: Sequence[Run]) -> str:
    parts = []
    for place, run in enumerate(runs, 1):
        found = layers(run.grid)
        if found is None:
            continue
        whose = f" of {run.name}" if len(runs) > 1 else ""
        for figure, name, title, told in _maps(found, run.unlocated):
            identifier = f"layers-{name}-{place}"
            parts.append(block(made, identifier, f"{title}{whose}", "", figure, told))
    if not parts:
        return ""
    return "\n".join(['<section id="layers"><h2>Layers</h2>', *parts, "</section>"])


def _maps(found: Layers, unlocated: int) -> list[tuple[Figure, str, str, str]]:
    """Figures with a name for the page, a title and what they show."""
    faults = "In the steps logged with layers none had gradient elements that are not finite."
    if found.faulty:
        faults = f"Not finite in {count(len(found.faulty), 'layer')}: {listed(found.faulty)}."
    if unlocated:
        records = count(unlocated, "record")
        faults += f" {records} with such elements came without rows that say in which layers."
    maps = []
    if found.norms:
        text = f"{faults} {_told(found)}"
        maps.append((found.norms, "norms", "Gradient norms before clipping", text))
    if found.nonfinite:
        text = (
            "By steps: the share of a layer's gradient elements that are NaN or infinite, if any."
        )
        if found.attempts:
            text += ATTEMPTS
        if len(found.faulty) > ROWS:
            faults += f" The worst {ROWS} are shown."
        maps.append((found.nonfinite, "nonfinite", "Non-finite gradients", f"{text} {faults}"))
    return maps


def _told(found: Layers) -> str:
    told = "Columns are the steps logged with layers, side by side"
    if found.merged:
        told += "; where they are too many, the largest value over several"
    told += "."
    if found.attempts:
        told += ATTEMPTS
    if found.norms and (low := lowest(found.norms)) is not None:
        told += f" Norms below {low:.2g} have its colour; pointing at one tells it."
    if found.shown < found.known:
        told += (
            f" {found.shown} of {found.known:,} layers: those with non-finite elements, "
            "then those whose norm rose furthest above its own median."
        )
    return told
