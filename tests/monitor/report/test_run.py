"""What is read of a run in one pass: worst values, attempts, incidents with their evidence."""

import math
from dataclasses import replace

import pytest

from fastclip.monitor import Monitor, StepRecord
from fastclip.monitor.bands import CALM
from fastclip.monitor.incidents import incidents
from fastclip.monitor.report.evidence import FIRST
from tests.monitor.making import changed, healthy, incident_log, mixtral
from tests.monitor.report.logs import always_clipped, eventful, read, run_of


@pytest.mark.parametrize(
    "records",
    [incident_log(), list(eventful()), mixtral(), healthy(300), always_clipped()],
    ids=["incidents", "attempts", "mixtral", "healthy", "always-clipped"],
)
def test_incidents_are_those_of_replay(records: list[StepRecord]) -> None:
    run = read(records)
    gap = CALM * max(1.0, (run.last - run.first) / run.records)
    monitor = Monitor()
    told_in = [(event, monitor.attempt) for r in records for event in monitor.replay((r,))]
    events, attempts = [event for event, _ in told_in], [attempt for _, attempt in told_in]
    assert [episode.incident for episode in run.episodes] == incidents(events, gap, attempts)
    assert run.events == len(events)
    told = sum(one.count for episode in run.episodes for one in episode.evidence.values())
    assert told == len(events)


def test_what_happens_again_after_a_rollback_is_an_incident_of_its_own() -> None:
    spiked = changed(healthy(210), ([200], "loss", 30.0))
    again = [replace(record, attempt=1) for record in spiked[150:]]
    found = [episode.incident for episode in read([*spiked, *again]).episodes]
    assert [(one.first, one.last, one.attempt) for one in found] == [(200, 200, 0), (200, 200, 1)]


def test_norms_of_what_was_rolled_back_are_left_out() -> None:
    records = healthy(300)
    run = read([replace(r, grad_norm=1e6) for r in records[:250]] + records[100:])
    expected = [1e6] * 100 + [record.grad_norm for record in records[100:]]
    assert list(run.norms) == expected


def test_evidence_is_the_first_events_and_the_worst() -> None:
    rising = (range(500, 700), "loss", lambda loss: loss + 10)
    records = changed(healthy(900), rising, ([650], "loss", 99.0))
    run = read(records)
    events = [event for event in Monitor().replay(records) if event.kind == "robust_spike"]
    assert len(events) > 2 * FIRST
    found = run.episodes[0].evidence["robust_spike", "loss"]
    assert found.count == len(events)
    shown = [witness.event for witness in found.witnesses()]
    worst = max(events, key=lambda event: event.value)
    assert shown == ([*events[:FIRST], worst] if worst not in events[:FIRST] else events[:FIRST])
    assert [witness.batch for witness in found.witnesses()] == [event.step for event in shown]


def test_extremes() -> None:
    run = run_of(incident_log)
    records = incident_log()
    losses = [(r.loss, r.step) for r in records if r.loss is not None and math.isfinite(r.loss)]
    worst = run.worst["loss"]
    assert (worst.value, worst.step) == max(losses)
    assert (worst.nonfinite, worst.first_nonfinite) == (3, 500)
    norm = run.worst["grad_norm"]
    assert (norm.nonfinite, norm.first_nonfinite) == (1, 502)
    assert math.isfinite(norm.value)


def test_clip_rate_is_that_of_the_last_hundred() -> None:
    records = [StepRecord(step, clipped=step % 3 == 0) for step in range(400)]
    rates = {point.step: point.value for point in read(records).series["clip_rate"].points()}
    assert rates[0] == 1.0
    assert rates[49] == sum(step % 3 == 0 for step in range(50)) / 50
    assert rates[399] == sum(step % 3 == 0 for step in range(300, 400)) / 100


def test_what_was_rolled_back() -> None:
    attempts = [(0, range(0, 50)), (1, range(30, 60)), (2, range(20, 25)), (3, range(23, 90))]
    run = read([StepRecord(step, 1.0, attempt=a) for a, steps in attempts for step in steps])
    kept = {(a, step) for a, steps in attempts for step in steps if not run.abandoned(step, a)}
    expected = {(0, s) for s in range(20)} | {(2, s) for s in range(20, 23)}
    assert kept == expected | {(3, s) for s in range(23, 90)}


def test_attempts_are_told_where_the_log_does_not_say() -> None:
    steps = [*range(50), *range(30, 80)]
    run = read([StepRecord(step, 1.0) for step in steps])
    assert run.attempts == {0, 1}


def test_every_event_is_marked_at_its_value() -> None:
    records = incident_log()
    run = read(records)
    marked = {
        (point.step, point.value)
        for (chart, _), marks in run.marks.items()
        if chart == "loss"
        for point in marks.points()
    }
    events = [event for event in Monitor().replay(records) if event.metric == "loss"]
    finite = {event.step for event in events if math.isfinite(event.value)}
    assert marked == {(step, records[step].loss) for step in finite if step != 501}
    topped = run.topped["loss", "critical"].points()
    assert [point.step for point in topped] == [500, 501, 777]


def test_a_metric_that_is_never_finite() -> None:
    run = read([replace(record, loss=math.nan) for record in healthy(40)])
    assert "loss" not in run.series
    assert run.lost["loss"].count == 40
    assert run.worst["loss"].value == -math.inf
