"""The page: one HTML file that needs nothing from elsewhere."""

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from html import escape as attribute
from importlib.resources import files
from typing import Any

from fastclip.monitor.report.calibrating import calibration_section
from fastclip.monitor.report.facts import facts, verdict
from fastclip.monitor.report.figures import charts
from fastclip.monitor.report.incidents_table import incidents_section
from fastclip.monitor.report.layers_section import layers_section
from fastclip.monitor.report.parts import Page, block, key, summary
from fastclip.monitor.report.run import Run
from fastclip.monitor.report.text import count, escape

SECTIONS = {
    **{"incidents": "Incidents", "steps": "Over steps", "layers": "Layers"},
    **{"calibration-section": "Calibration"},
}
NO_SCRIPT = (
    "<noscript><p class='verdict info'>The charts need JavaScript; the tables have what they show."
    "</p></noscript>"
)


def plotly_source() -> str:
    """The script of plotly, as its Python package brings it along.

    Raises `ImportError` with what to install where there is none.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ImportError("a report needs plotly: pip install 'torch-fastclip[report]'") from error
    source: str = get_plotlyjs()
    return source


def page(runs: Sequence[Run], plotly: str) -> str:
    """The document for one run, or for two beside each other."""
    made = Page()
    sections = [
        verdict(runs),
        facts(runs),
        incidents_section(runs),
        _charts(made, runs),
        layers_section(made, runs),
        calibration_section(made, runs),
    ]
    script = files(__package__).joinpath("charts.js").read_text(encoding="utf-8")
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    names = " and ".join(escape(run.name) for run in runs)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script, plotly)}">',
            f"<title>{names}: fastclip report</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            _header(runs, sections),
            NO_SCRIPT,
            '<p id="status" class="verdict info" role="status" hidden></p>',
            *filter(None, sections),
            "<footer>Made by <code>fastclip report</code>. This file is complete in itself and "
            "loads nothing.</footer>",
            "</main>",
            f'<script type="application/json" id="figures">{_json(made.figures)}</script>',
            f'<script type="text/plain" id="plotly">{_packed(plotly)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _header(runs: Sequence[Run], sections: Sequence[str]) -> str:
    if len(runs) == 1:
        title = escape(runs[0].name)
    else:
        title = ' <span class="versus">beside</span> '.join(
            f'<span class="dot run{place}"></span>{escape(run.name)}'
            for place, run in enumerate(runs, 1)
        )
    links = "".join(
        f'<a href="#{name}">{label}</a>'
        for name, label in SECTIONS.items()
        if any(f'<section id="{name}"' in section for section in sections)
    )
    return (
        f'<header><p class="brand">fastclip report</p><h1>{title}</h1>'
        f'<nav aria-label="Sections">{links}</nav></header>'
    )


def _charts(made: Page, runs: Sequence[Run]) -> str:
    drawn = charts(runs)
    if not drawn:
        return ""
    parts = ['<section id="steps"><h2>Over steps</h2>', key(runs)]
    more = False
    for chart, figure in drawn:
        if chart.more and not more:
            parts.append("<h2>Activations and parameters</h2>")
            more = True
        identifier = f"chart-{chart.name}"
        parts.append(block(made, identifier, chart.title, chart.note, figure, summary(chart, runs)))
    widest = max((s.width for run in runs for s in run.series.values()), default=1)
    if widest > 2:  # of two, both are drawn
        parts.append(
            f'<p class="quiet">Long series are thinned: of up to {count(widest, "value")} in a row '
            "the smallest and the largest are drawn, so no spike is lost.</p>"
        )
    return "\n".join([*parts, "</section>"])


def _policy(script: str, plotly: str) -> str:
    """Only these two scripts run, and nothing is loaded: whatever a log may contain."""
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in (script, plotly))
    return attribute(
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(text: str) -> str:
    """A third of the size: 4.8 MB of plotly would leave no room for data."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _json(document: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
