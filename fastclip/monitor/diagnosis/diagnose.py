"""`diagnose`: from the facts that a log shows to symptom, boundary, interventions and checks."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastclip.monitor.calibration import suggest_max_norm
from fastclip.monitor.diagnosis import table
from fastclip.monitor.diagnosis.advice import ADVICE, Advice
from fastclip.monitor.diagnosis.baseline import Comparison, in_step, newest
from fastclip.monitor.diagnosis.gathering import Gathering
from fastclip.monitor.diagnosis.result import Compared, Diagnosis, Evidence
from fastclip.monitor.log import JSONL
from fastclip.monitor.records import StepRecord

Log = str | os.PathLike[str] | Iterable[StepRecord]

FEWEST_NORMS = 1000  # what suggest_max_norm asks for a clip rate of 1 %
BEFORE = "norms before the onset"
PAST = 100  # steps past the onset after which a new attempt has got over it
FULL = 105  # losses that Sustained needs, the most of all that judge the loss


def diagnose(log: Log, baseline: Log | None = None) -> Diagnosis:
    """What went wrong in a run, where, what to do about it, and how to see that it helped.

    >>> print(diagnose("run.jsonl", baseline="good.jsonl"))

    The log is read once, by the default detectors and the normal bands of the Monitor; memory does
    not grow with it. `baseline` is the log of a healthy run, to compare with over the steps that
    both have, each as it was run last (a rollback by more than 10,000 records aside); where its
    `batch` is a mapping with "time" in seconds, throughput too. It also gives the norms for a
    threshold if the log has fewer than 1,000 from before the onset.

    Raises `ValueError` where one of them has no records.
    """
    found, good, comparison = Gathering(), Gathering(), Comparison()
    runs = _added(found, log), _added(good, () if baseline is None else baseline)
    for record, other in in_step(*map(newest, runs)):
        if record is not None and other is not None:
            comparison.add(record, other)
    if not found.counts["records"]:
        raise ValueError("there are no records to diagnose")
    if baseline is None:
        return _decided(found, found.norms, BEFORE, ())
    if not good.counts["records"]:
        raise ValueError("there are no records in the baseline")
    rows = comparison.rows(found, good)
    if len(found.norms) < FEWEST_NORMS <= len(good.norms):
        return _decided(found, good.norms, "norms of the baseline", rows)
    return _decided(found, found.norms, BEFORE, rows)


def _added(gathering: Gathering, log: Log) -> Iterator[StepRecord]:
    """The records of a log, each once it is in `gathering`."""
    for record in JSONL(log) if isinstance(log, str | os.PathLike) else log:
        gathering.add(record)
        yield record


def _decided(
    found: Gathering, norms: list[float], source: str, comparison: tuple[Compared, ...]
) -> Diagnosis:
    newest, past = found.evidence(), found.abandoned()
    every = past | newest
    symptom = _symptom(every)
    boundary = _boundary(symptom.name, every)
    shown = _shown(symptom, newest) or _shown(symptom, past)
    first = shown[0] if shown else None
    # What was rolled back is advised on only where the rest asks for nothing.
    now, evidence = _symptom(newest), newest
    if now.name in ("none", "isolated"):
        now, evidence = symptom, every
    about = _boundary(now.name, evidence)
    causes = _shown(now, newest) or _shown(now, past)
    facts = {*evidence, *_of_the_whole(found, evidence, causes, norms)}
    if now is not symptom:
        facts.add(table.PAST_AND_NOW)
    advice = [row for row in ADVICE if _holds(row, now.name, about.name, facts)]
    places = _counted(found) | _threshold(norms, source) | _placed(found, evidence, causes, about)
    places |= {"symptom": symptom.name, "now": now.name}
    gaps = [table.GAPS[name] for name in _gaps(found, every, boundary.name)]
    return Diagnosis(
        symptom.name,
        boundary.name,
        tuple(row.action.format_map(places) for row in advice),
        (
            *(row.check.format_map(places) for row in advice),
            *_recording([gap.record.format_map(places) for gap in gaps if gap.record]),
        ),
        first and first.onset,
        first and first.onset_metric,
        tuple(of[fact] for fact in table.FACTS for of in (past, newest) if fact in of),
        tuple(gap.what.format_map(places) for gap in gaps),
        comparison,
    )


def _symptom(facts: Mapping[str, Evidence]) -> table.Symptom:
    return next(row for row in table.SYMPTOMS if not row.facts or facts.keys() & row.facts)


def _shown(symptom: table.Symptom, facts: Mapping[str, Evidence]) -> list[Evidence]:
    """In the order of the log, so the first of them is the first record that shows the symptom."""
    return [one for fact, one in facts.items() if fact in symptom.facts]


def _boundary(symptom: str, facts: Mapping[str, Evidence]) -> table.Boundary:
    return next(
        row
        for row in table.BOUNDARIES
        if not (row.facts or row.symptoms) or facts.keys() & row.facts or symptom in row.symptoms
    )


def _holds(row: Advice, symptom: str, boundary: str, facts: set[str]) -> bool:
    return (
        row.symptom in (None, symptom)
        and row.boundary in (None, boundary)
        and (row.facts is None or not facts.isdisjoint(row.facts))
    )


def _recording(wanted: Sequence[str]) -> Iterator[str]:
    if wanted:
        numbered = (f"({number}) {one}" for number, one in enumerate(wanted, 1))
        text = wanted[0] if len(wanted) == 1 else "; ".join(numbered)
        yield f"So that the next log can tell: {text}."


def _of_the_whole(
    found: Gathering,
    evidence: Mapping[str, Evidence],
    shown: Sequence[Evidence],
    norms: Sequence[float],
) -> Iterator[str]:
    """The facts of the log as a whole."""
    yield table.CALIBRATED if len(norms) >= FEWEST_NORMS else table.UNCALIBRATED
    if shown and all(one.abandoned for one in shown):
        over = found.step >= max(one.onset for one in shown) + PAST
        yield table.PAST_AND_OVER if over else table.PAST
    if shown and found.rates.jump(shown[0].onset):
        yield table.LR_JUMPED
    if found.skipped.many() and table.SCALE_HELD not in evidence:
        yield table.MANY_SKIPPED
    lost = evidence.get(table.LOSS_NONFINITE)
    passed = lost and table.STUCK not in evidence and not found.spoiled
    if lost and passed and lost.records[0].metric == "loss" and found.finite_before(lost.first):
        yield table.PASSED
    elif not found.counts["loss_scale"] and not found.spoiled:
        yield table.UNSCALED
    if evidence.keys().isdisjoint(table.BACK.values()):
        if shown:
            yield table.SLOW if shown[0].fact == table.DRIFT else table.ABRUPT
        if evidence.keys() & {table.OPEN, table.LEVEL}:
            yield table.AWAY


def _counted(found: Gathering) -> dict[str, Any]:
    counts = found.counts
    return {
        "newest": found.attempt,
        "losses": found.losses,
        "with_loss": f"{counts['loss']:,}",
        "with_norm": f"{counts['grad_norm']:,}",
        "scale": f"{found.scale:g}",
        "held": f"{found.held:,}",
        "skipped": f"{found.skipped.count:,} of {found.skipped.known:,}",
        "row": f"{found.skipped.row:,}",
    }


def _placed(
    found: Gathering,
    evidence: Mapping[str, Evidence],
    shown: Sequence[Evidence],
    boundary: table.Boundary,
) -> dict[str, Any]:
    """Steps and batches, of what shows the symptom and of what shows the boundary."""
    places: dict[str, Any] = {}
    if shown:
        first = shown[0]
        at_boundary = [one for fact, one in evidence.items() if fact in boundary.facts]
        if found.spoiled and table.BACKWARD_NONFINITE in evidence:
            at_boundary = [evidence[table.BACKWARD_NONFINITE]]  # NaN parameters came of its step
        places = {
            "onset": first.onset,
            "target": max(0, first.onset - 1),
            # The gradient left before the loss, and with the loss came the alarm.
            "step": first.records[first.fact == table.GRADIENT_FIRST].step,
            "batch": _batch((at_boundary or shown)[0]),
            "past": found.step - first.onset,
            "span": _span(first),
            "lr": "not in the log" if first.lr is None else f"{first.lr:.6g}",
            "best": f"{first.records[0].baseline or 0:.4g}",
            "attempt": max(one.attempt for one in shown),
        }
    if table.BACKWARD_NONFINITE in evidence:
        backward = evidence[table.BACKWARD_NONFINITE]
        places |= {"backward": backward.first, "backward_batch": _batch(backward)}
    if table.LOSS_NONFINITE in evidence:
        places["lost"] = _lost(evidence[table.LOSS_NONFINITE], found.lost)
    if shown and (jump := found.rates.jump(shown[0].onset)):
        places |= {"lr_step": jump.step}
        places |= {"lr_before": f"{jump.before:.6g}", "lr_after": f"{jump.after:.6g}"}
    if start := found.skipped.start:
        places |= {"skip": start.step, "skip_batch": _named(start.batch, start.step)}
    if table.OPEN in evidence:
        places["open"] = evidence[table.OPEN].first
    return places


def _threshold(norms: list[float], source: str) -> dict[str, str]:
    places = {"norms": f"{len(norms):,} {source}"}
    if len(norms) >= FEWEST_NORMS:
        found = suggest_max_norm(norms)
        places["threshold"] = f"{found.max_norm:.4g}"
        if found.warnings:
            places["norms"] += f" (their median changed by a factor of {found.drift:.3g})"
    return places


def _batch(evidence: Evidence) -> str:
    if evidence.records[0].metric == "val_loss":
        return f"the validation data of step {evidence.first}"
    return _named(evidence.batch, evidence.first)


def _named(batch: Any, step: int) -> str:
    return f"the batch of step {step}" if batch is None else f"batch {batch!r:.60} (step {step})"


def _lost(evidence: Evidence, times: int) -> str:
    """That of the first record, and how many more there are with parameters that were finite."""
    more = times - 1
    rest = f" and {more} more up to step {evidence.last}" if more else ""
    return _batch(evidence) + rest


def _span(evidence: Evidence) -> str:
    """What a rollback leaves out: the batches from the step before the onset to the alarm."""
    first = max(0, evidence.onset - 1)
    last = evidence.records[evidence.fact == table.GRADIENT_FIRST].step
    if evidence.batches is None:
        return f"the batches of steps {first} to {last}"
    names = " to ".join(f"{batch!r:.60}" for batch in evidence.batches)
    return f"batches {names} (steps {first} to {last})"


def _gaps(found: Gathering, evidence: Mapping[str, Evidence], boundary: str) -> Iterator[str]:
    """Which of `table.GAPS` the log has."""
    counts = found.counts
    unclear = table.GRADIENT_NONFINITE in evidence
    taken = unclear or table.BACKWARD_NONFINITE in evidence
    if not counts["loss"]:
        yield "no loss"
    elif found.losses < FULL:
        yield "few losses"
    if not counts["grad_norm"]:
        yield "no norm"
    elif counts["grad_norm"] < counts["loss"] / 2:
        yield "few norms"
    if counts["perhaps skipped"]:
        yield "no skipped"
    if (taken or table.OVERFLOWS in evidence) and not counts["loss_scale"]:
        yield "no scale"
    if unclear and boundary == "none":
        yield "no boundary"
    if counts["not positive"]:
        yield "not positive"
    if table.OPEN in evidence:
        yield "open"
