"""A NaN, an infinity or nothing, in any metric of any record, changes no other verdict."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import (
    ClipRate,
    Drift,
    Event,
    LossScaleDrop,
    Monitor,
    NonFinite,
    RobustSpike,
    Spike,
    StepRecord,
    Sustained,
    default_detectors,
)
from fastclip.monitor.records import METRICS, WATCHED
from tests.monitor.making import changed, healthy, times

BAD = (math.nan, math.inf, -math.inf)
STEPS = 260


def short(metric: str) -> list[Any]:
    """Detectors of a metric with windows so short that all of them fire in a short log."""
    return [
        *(Spike(metric, 1.2, 10), RobustSpike(metric, 3.0, 10), RobustSpike(metric, 3.0, 10, True)),
        *(Sustained(metric, 3, 1.1, 1.2), Drift(metric, 5, 1.05)),
    ]


def noisy() -> list[StepRecord]:
    """Every metric rises by factors now and then, each at other steps."""
    records = healthy(STEPS, seed=3)
    for place, metric in enumerate(METRICS):
        if metric == "nonfinite_count":
            records = changed(records, (range(150 + place, STEPS, 9), metric, 7))
            continue
        records = changed(
            records,
            (range(STEPS), metric, lambda x: 1.0 if x is None else x),
            (range(140 + place, STEPS, 37), metric, times(30)),
            (range(200 + place, 230 + place), metric, times(2)),
        )
    return records


NOISY = noisy()


def told(events: Iterable[Event]) -> list[str]:
    """Without the onset, which may be that of the bad value, and what is said of that value."""
    return [
        repr(replace(event, onset=None, onset_metric=None))
        for event in events
        if event.kind != "nonfinite" or event.metric == "nonfinite_count"
    ]


@pytest.mark.parametrize("metric", METRICS)
def test_each_detector_fires_without_gaps(metric: str) -> None:
    """What the next test would show nothing without."""
    kinds = {event.kind for event in Monitor(short(metric)).replay(NOISY)}
    assert kinds >= {"spike", "robust_spike"} - ({"spike"} if metric == "lr" else set())


places = st.sets(st.integers(0, STEPS - 1), max_size=12)


@pytest.mark.parametrize("metric", [m for m in METRICS if m != "nonfinite_count"])
@settings(max_examples=12, deadline=None)
@given(places, st.sampled_from(BAD))
def test_a_bad_value_is_as_good_as_none(metric: str, steps: set[int], bad: float) -> None:
    def verdicts(value: float | None) -> list[str]:
        detectors = [*short(metric), *default_detectors()]
        return told(Monitor(detectors).replay(changed(NOISY, (steps, metric, value))))

    assert verdicts(bad) == verdicts(None)


ALONE: dict[str, Callable[[], Any]] = {
    "clip-rate": lambda: ClipRate(0, 5),
    "loss-scale-drop": lambda: LossScaleDrop(1, 5),
}


@pytest.mark.parametrize("name", ALONE)
@settings(max_examples=25, deadline=None)
@given(places)
def test_none_is_as_good_as_no_record(name: str, steps: set[int]) -> None:
    metric = "clipped" if name == "clip-rate" else "loss_scale"
    records = changed(NOISY, (range(0, STEPS, 7), "loss_scale", 1024.0))
    events = Monitor([ALONE[name]()]).replay(changed(records, (steps, metric, None)))
    left = [record for record in records if record.step not in steps]
    assert told(events) == told(Monitor([ALONE[name]()]).replay(left))
    assert events


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(WATCHED), places, st.sampled_from(BAD))
def test_metrics_do_not_touch_each_other(metric: str, steps: set[int], bad: float) -> None:
    """The verdicts about all other metrics are those of the log as it was."""
    others = [detector for other in METRICS if other != metric for detector in short(other)]
    found = told(Monitor(others).replay(changed(NOISY, (steps, metric, bad))))
    assert found == told(Monitor(others).replay(NOISY))
    expected = [(step, metric) for step in sorted(steps)]
    events = Monitor([NonFinite()]).replay(changed(NOISY, (steps, metric, bad)))
    assert [(e.step, e.metric) for e in events if e.metric == metric] == expected


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(WATCHED), st.integers(0, STEPS - 1), st.sampled_from(BAD))
def test_an_excursion_of_a_bad_value_ends(metric: str, step: int, bad: float) -> None:
    """Ten records later onsets are what they were."""
    calm = healthy(STEPS + 40, seed=3)
    spike = changed(calm, ([STEPS + 30], "loss", times(9)))
    wanted = Monitor().replay(changed(spike, ([step], metric, None)))
    assert {(event.onset, event.onset_metric) for event in wanted} == {(STEPS + 30, "loss")}
    events = Monitor().replay(changed(spike, ([step], metric, bad)))
    assert [event for event in events if event.kind != "nonfinite"] == wanted
