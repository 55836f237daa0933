"""The curve of clip rate against threshold, and what threshold it suggests."""

from collections.abc import Sequence

from fastclip.monitor.calibration import clip_rates, suggest_max_norm
from fastclip.monitor.report.heatmaps import calibration
from fastclip.monitor.report.parts import Page, block
from fastclip.monitor.report.run import Run
from fastclip.monitor.report.text import clean, escape

FEWEST = 3  # points that make a curve


def calibration_section(made: Page, runs: Sequence[Run]) -> str:
    with_norms = [(place, run) for place, run in enumerate(runs, 1) if run.norms]
    if not with_norms:
        return ""
    curves = [(run.name, f"var(--run{place})", clip_rates(run.norms)) for place, run in with_norms]
    drawn = [curve for curve in curves if len(curve[2]) >= FEWEST]
    words = [_words(run, len(runs) > 1) for _, run in with_norms]
    parts = ['<section id="calibration-section"><h2>Calibration</h2>']
    if drawn:
        told = " ".join(_points(name, curve, len(drawn) > 1) for name, _, curve in drawn)
        title = "Clip rate against threshold"
        note = (
            "of the norms in the log, what was rolled back left out; calibrate with a healthy run"
        )
        parts.append(block(made, "calibration", title, note, calibration(drawn), told))
    return "\n".join([*parts, f'<div class="card">{"".join(words)}</div></section>'])


def _points(name: str, curve: Sequence[tuple[float, float]], several: bool) -> str:
    pairs = ", ".join(f"{rate:.2%} at {threshold:.4g}" for threshold, rate in curve)
    return f"{clean(name)}: {pairs}." if several else f"Clipped: {pairs}."


def _words(run: Run, several: bool) -> str:
    whose = f"<b>{escape(run.name)}</b>: " if several else ""
    try:
        found = suggest_max_norm(run.norms)
    except ValueError as error:
        return f"<p>{whose}No threshold to suggest: {escape(error)}.</p>"
    warnings = "".join(f'<p class="warning">{escape(text)}.</p>' for text in found.warnings)
    return (
        f"<p>{whose}<code>max_norm={found.max_norm:.6g}</code> would clip {found.clip_rate:.2%} of "
        f"{found.samples:,} such steps. Median norm of the second half over the first: "
        f"{found.drift:.3g}.</p>{warnings}"
    )
