"""A diagnosis as a page: the four phases of the playbook, each with what it rests on."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastclip.monitor.diagnosis import table

if TYPE_CHECKING:
    from fastclip.monitor.diagnosis.result import Compared, Diagnosis, Evidence, Seen

WIDTH = 79
NOTE = table.GAPS["no scale"].what  # of a run that is not fp16 it says nothing


def page(found: "Diagnosis") -> str:
    """The page, without a newline at its end."""
    symptom = next(row for row in table.SYMPTOMS if row.name == found.symptom)
    boundary = next(row for row in table.BOUNDARIES if row.name == found.boundary)
    lines = [
        _heading("A", "symptom", found.symptom + _doubt(found)),
        *_filled(_meaning(symptom, found), "   "),
    ]
    if found.onset is not None:
        lines += _filled(f"Onset: step {found.onset} ({found.onset_metric}).", "   ")
    attempts = any(evidence.attempt for evidence in found.evidence)
    for evidence in found.evidence:
        lines += _evidence(evidence, attempts, symptom, boundary)
    for gap in found.unjudged:
        what = "Note" if gap == NOTE else "Not enough evidence"
        lines += _filled(f"{what}: {gap}.", "   ? ", "     ")
    lines += ["", _heading("B", "boundary", found.boundary)]
    lines += _filled(_meaning(boundary, found), "   ")
    lines += ["", _heading("C", "interventions", "" if found.interventions else "none")]
    lines += _numbered(found.interventions)
    lines += ["", _heading("D", "checks", "" if found.checks or found.comparison else "none")]
    lines += _numbered(found.checks)
    if found.comparison:
        lines += [*([""] if found.checks else []), *_comparison(found.comparison)]
    return "\n".join(lines)


def _heading(letter: str, phase: str, what: str) -> str:
    return f"{letter}. {phase.capitalize()}{f': {what}' if what else ''}"


def _doubt(found: "Diagnosis") -> str:
    """That nothing was seen says little where little could be."""
    doubts = {*found.unjudged} - {NOTE}
    return ", but not enough evidence" if found.symptom == "none" and doubts else ""


def _meaning(row: table.Symptom | table.Boundary, found: "Diagnosis") -> str:
    if found.symptom == "none" and found.interventions and isinstance(row, table.Symptom):
        return table.UNDISTURBED
    newest = {each.fact for each in found.evidence if not each.abandoned} & {*row.facts}
    facts = newest or {each.fact for each in found.evidence} & {*row.facts}
    return row.back if row.back and facts and facts <= table.OVER else row.meaning


def _filled(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _numbered(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield from _filled(text, f"   {number}. ", "      ")


def _evidence(
    evidence: "Evidence", attempts: bool, symptom: table.Symptom, boundary: table.Boundary
) -> list[str]:
    """Facts that decide are marked; the others are there to be known."""
    decides = evidence.fact in symptom.facts or evidence.fact in boundary.facts
    times = "once" if evidence.times == 1 else f"{evidence.times:,} times"
    where = f"step {evidence.first}"
    if evidence.last != evidence.first:
        where = f"steps {evidence.first} to {evidence.last}"
    where += ", rolled back" if evidence.abandoned else ""
    lines = _filled(f"{evidence.fact}: {times}, {where}", "   * " if decides else "   - ", "     ")
    if evidence.message:
        lines += _filled(evidence.message, "       ")
    if decides or evidence.times > 1 or not evidence.message:
        seen = [_seen(one, attempts) for one in evidence.records]
        more = ["..."] if evidence.times > len(seen) else []
        lines += _filled("; ".join([*seen, *more]), "       ")
    return lines


def _seen(seen: "Seen", attempts: bool) -> str:
    attempt = f", attempt {seen.attempt}" if attempts else ""
    against = "" if seen.baseline is None else f" (against {seen.baseline:.4g})"
    return f"step {seen.step}{attempt}: {seen.metric} {seen.value:.6g}{against}"


def _comparison(rows: Iterable["Compared"]) -> Iterator[str]:
    yield f"   {'':<38}{'this log':>14}{'baseline':>14}"
    for row in rows:
        yield f"   {row.quantity:<38}{_number(row.log):>14}{_number(row.baseline):>14}"
        if row.note:
            yield from _filled(row.note, "       ")


def _number(value: float | None) -> str:
    return "not in it" if value is None else f"{value:.5g}"
