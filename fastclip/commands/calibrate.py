"""`fastclip calibrate`: a clipping threshold from the log of a healthy run."""

from collections.abc import Iterable, Sequence

from fastclip.commands import InputError, print_json
from fastclip.commands.logs import Log
from fastclip.monitor import Calibration, StepRecord, suggest_max_norm
from fastclip.monitor.calibration import clip_rates, lowest_clip_rate


def run(log: str, clip_rate: float, start: int | None, json: bool) -> int:
    """Suggest and print."""
    reader = Log(log)
    norms = _norms(reader, start)
    try:
        found = suggest_max_norm(norms, clip_rate)
    except ValueError as error:
        lowest = lowest_clip_rate(norms) if 0 < clip_rate < 1 else None
        way_out = "" if lowest is None else f": take --clip-rate {lowest:g} or more"
        raise InputError(f"{error}{way_out}") from error
    reader.report_skipped()
    if json:
        print_json(found._asdict())
    else:
        print(_text(reader, found, clip_rates(norms)))
    return 0


def _norms(records: Iterable[StepRecord], start: int | None) -> list[float | None]:
    """Of the steps from `start` on; a step that comes again takes the place of what came from
    there on, which was rolled back."""
    kept: list[StepRecord] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return [record.grad_norm for record in kept if start is None or record.step >= start]


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
