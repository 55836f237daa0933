"""`fastclip calibrate`: a clipping threshold from the log of a healthy run."""

from collections.abc import Sequence

from fastclip.commands import InputError, print_json
from fastclip.commands.logs import Log
from fastclip.monitor import Calibration, suggest_max_norm
from fastclip.monitor.calibration import clip_rates


def run(log: str, clip_rate: float, json: bool) -> int:
    """Suggest and print."""
    reader = Log(log)
    norms = [record.grad_norm for record in reader]
    try:
        found = suggest_max_norm(norms, clip_rate)
    except ValueError as error:
        raise InputError(str(error)) from error
    reader.report_skipped()
    if json:
        print_json(found._asdict())
    else:
        print(_text(reader, found, clip_rates(norms)))
    return 0


def _text(log: Log, found: Calibration, curve: Sequence[tuple[float, float]]) -> str:
    lines = [
        str(log),
        f"max_norm={found.max_norm:.6g} clips {found.clip_rate:.2%} of {found.samples:,} steps",
        f"median norm, second half over first: {found.drift:.3g}",
        *(f"warning: {warning}" for warning in found.warnings),
        "",
        f"{'max_norm':>12}{'clipped':>10}",
        *(f"{threshold:>12.6g}{rate:>10.2%}" for threshold, rate in curve),
    ]
    return "\n".join(lines)
