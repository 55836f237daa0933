"""Detectors against their definitions, at their edges, and what they refuse."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import (
    ClipRate,
    Detector,
    Drift,
    Event,
    LossScaleDrop,
    NonFinite,
    RobustSpike,
    Skips,
    Spike,
    StepRecord,
    Sustained,
    default_detectors,
)
from tests.monitor import reference
from tests.monitor.making import changed, healthy, incident_log, of_loss, verdicts

NAN, INF = math.nan, math.inf
BAD = (None, NAN, INF, -INF)


def found(events: list[Event]) -> reference.Found:
    return [(event.step, event.value, event.baseline or 0.0) for event in events]


# Values that make ties and alarms likely, among values that are none.
losses = st.lists(
    st.sampled_from([1.0, 1.1, 1.5, 2.0, 2.25, 3.0, 7.0, 0.0, -1.0, 1e30]) | st.sampled_from(BAD),
    max_size=60,
).map(of_loss)


class ShortSustained(Sustained):
    baseline = 6


CASES: dict[str, tuple[Detector, Callable[[list[tuple[int, float]]], reference.Found]]] = {
    "spike": (Spike(window=5), lambda v: reference.spike(v, 1.5, 5)),
    "spike-1": (Spike(ratio=2.0, window=1), lambda v: reference.spike(v, 2.0, 1)),
    "robust": (RobustSpike("loss", 2.0, 6), lambda v: reference.robust_spike(v, 2.0, 6, False)),
    "robust-odd": (RobustSpike("loss", 3, 5), lambda v: reference.robust_spike(v, 3, 5, False)),
    "robust-log": (
        RobustSpike("loss", 2.0, 6, log=True),
        lambda v: reference.robust_spike(v, 2.0, 6, True),
    ),
    "sustained": (
        ShortSustained(window=3),
        lambda v: reference.sustained(v, 3, 1.15, 1.5, 6),
    ),
    "drift": (Drift(window=4), lambda v: reference.drift(v, 4, 1.1)),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(records=losses)
def test_is_its_definition(name: str, records: list[StepRecord]) -> None:
    detector, definition = CASES[name]
    assert found(verdicts(detector, records)) == definition(reference.recorded(records))


@pytest.mark.parametrize("seed", range(3))
def test_defaults_are_their_definition_on_a_long_log(seed: int) -> None:
    records = [
        replace(record, grad_norm=record.grad_norm and record.grad_norm * 1.5**seed)
        for record in incident_log(1000 + 300 * seed)
    ]
    losses = reference.recorded(records)
    norms = reference.recorded(records, "grad_norm")
    expected = [
        reference.spike(losses, 1.5, 100),
        reference.robust_spike(losses, 7, 100, False),
        reference.robust_spike(norms, 7, 100, True),
        reference.sustained(losses, 5, 1.15, 1.5, 100),
        reference.drift(losses, 50, 1.1),
    ]
    detectors = default_detectors()[:5]
    assert [found(verdicts(detector, records)) for detector in detectors] == expected
    assert sum(map(len, expected)) > 20


def test_silent_until_the_window_is_full() -> None:
    values = [1.0] * 4 + [9.0, 1.0]
    assert [e.step for e in verdicts(Spike(window=4), of_loss(values))] == [4]
    assert verdicts(Spike(window=5), of_loss(values)) == []
    assert verdicts(RobustSpike("loss", window=5), of_loss(values)) == []
    late = [1.0] * 100 + [9.0] * 5
    assert [e.step for e in verdicts(Sustained(), of_loss(late))] == [104]
    assert verdicts(Sustained(), of_loss(late[1:])) == []
    assert [e.step for e in verdicts(Drift(window=2), of_loss([1.0, 1.0, 9.0]))] == [2]
    assert verdicts(Drift(window=2), of_loss([9.0, 1.0, 9.0, 1.0])) == []


def test_a_level_shift_ends_by_itself() -> None:
    steps = [event.step for event in verdicts(Spike(), of_loss([1.0] * 200 + [4.0] * 200))]
    assert steps == list(range(200, steps[-1] + 1))
    assert 250 < steps[-1] < 300


def test_bounds_are_included_or_not_as_said() -> None:
    assert verdicts(Spike(ratio=1.5, window=2), of_loss([2.0, 2.0, 3.0])) != []
    assert verdicts(Drift(window=1, ratio=1.5), of_loss([2.0, 3.0])) == []
    assert verdicts(ClipRate(0.5, 2), [StepRecord(i, clipped=i > 0) for i in range(2)]) == []
    edge = of_loss([2.0] * 100 + [2.5, 3.0])
    assert verdicts(Sustained(window=2, sustained=1.25, critical=1.4), edge) == []
    assert verdicts(Sustained(window=2, sustained=1.2, critical=1.5), edge) == []
    assert len(verdicts(Sustained(window=2, sustained=1.2, critical=1.4), edge)) == 1


@pytest.mark.parametrize("level", [0.0, -3.0])
@pytest.mark.parametrize(
    "detector", [Spike(), Sustained(window=1), Drift(window=1)], ids=lambda d: d.kind
)
def test_ratios_are_silent_without_a_positive_baseline(level: float, detector: Detector) -> None:
    assert verdicts(detector, of_loss([level] * 150 + [50.0])) == []
    assert len(verdicts(detector, of_loss([0.1] * 150 + [50.0]))) == 1


def test_a_robust_spike_has_any_sign() -> None:
    noise = [record.loss or 0 for record in healthy(400)][200:]
    events = verdicts(RobustSpike("loss"), of_loss([*(x - 9 for x in noise), -5.0]))
    assert [event.step for event in events] == [200]


def test_logarithms_leave_out_what_has_none() -> None:
    norms = [1.0, 0.0, 1.1, -1.0, 0.9, 50.0]
    records = [StepRecord(i, grad_norm=norm) for i, norm in enumerate(norms)]
    [event] = verdicts(RobustSpike("grad_norm", window=3, log=True), records)
    assert (event.step, event.value, event.baseline) == (5, 50.0, 1.0)


def test_a_state_from_before_log_was_set() -> None:
    records = [StepRecord(i, grad_norm=float(i % 3)) for i in range(9)]
    state = RobustSpike("grad_norm", window=5).init()
    for record in records:
        state, _ = RobustSpike("grad_norm", window=5)(state, record)
    loaded = RobustSpike("grad_norm", window=5, log=True)
    assert [e.value for e in loaded(state, StepRecord(9, grad_norm=100.0))[1]] == [100.0]


METRICS = ("loss", "val_loss", "grad_norm", "activation_max", "param_norm", "update_ratio")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_nonfinite_names_each_metric_at_once(metric: str, bad: float) -> None:
    [event] = verdicts(NonFinite(), [replace(StepRecord(0), **{metric: bad})])  # type: ignore[arg-type]
    assert (event.metric, event.level, event.step) == (metric, "critical", 0)
    assert str(event.value) == str(bad)
    assert event.message == f"{metric} is {bad}"


def test_nonfinite_is_milder_when_the_step_was_skipped() -> None:
    record = StepRecord(3, 1.0, grad_norm=INF, nonfinite_count=2, skipped=True)
    events = verdicts(NonFinite(), [record])
    assert [(e.metric, e.level, e.value) for e in events] == [
        ("grad_norm", "warn", INF),
        ("nonfinite_count", "warn", 2),
    ]
    events = verdicts(NonFinite(), [replace(record, skipped=False)])
    assert [event.level for event in events] == ["critical", "critical"]
    assert verdicts(NonFinite(), [StepRecord(0), StepRecord(1, 1.0, nonfinite_count=0)]) == []


def scales(*values: float | None) -> list[StepRecord]:
    return [StepRecord(i, loss_scale=value) for i, value in enumerate(values)]


def test_loss_scale_drop_counts_from_the_start_and_forgets() -> None:
    falling = scales(8, 4, None, 2, NAN, 1, 1, 0.5)
    events = verdicts(LossScaleDrop(), falling)
    assert [(e.step, e.value, e.baseline) for e in events] == [(5, 1, 2), (7, 0.5, 1)]
    # Drops at the recorded scales 2, 3 and 5: within 4 of them, not within 3.
    records = scales(8, 4, 2, 2, 1)
    assert [e.step for e in verdicts(LossScaleDrop(window=4), records)] == [4]
    assert verdicts(LossScaleDrop(window=3), records) == []
    # A dynamic scale at work: it doubles and is halved again, far apart.
    steady = scales(*([8.0] * 60 + [4.0] * 60) * 5)
    assert verdicts(LossScaleDrop(), steady) == []


def test_clip_rate_is_of_the_window_with_the_record() -> None:
    flags = [True, False, None, True, True, False, False]
    records = [StepRecord(i, clipped=flag) for i, flag in enumerate(flags)]
    events = verdicts(ClipRate(over=0.5, window=3), records)
    assert found(events) == [(3, 2 / 3, 0.5), (4, 2 / 3, 0.5), (5, 2 / 3, 0.5)]


def test_skips_in_a_row() -> None:
    """Nine are silent, the tenth and those after it are not; a missing flag is neither."""
    flags = [True, False, *[True] * 4, None, *[True] * 8, False, True]
    records = [StepRecord(i, skipped=flag) for i, flag in enumerate(flags)]
    events = verdicts(Skips(), records)
    assert found(events) == [(12, 10, 10), (13, 11, 10), (14, 12, 10)]
    assert {(event.kind, event.level, event.metric) for event in events} == {
        ("skips", "critical", "skipped")
    }
    assert [e.level for e in verdicts(Skips(1, "warn"), records[:2])] == ["warn"]


def test_levels_and_kinds() -> None:
    events = [event for d in default_detectors() for event in verdicts(d, incident_log())]
    levels = {(event.kind, event.level) for event in events}
    assert levels == {
        *{("spike", "warn"), ("robust_spike", "warn"), ("sustained", "critical")},
        *{("drift", "warn"), ("nonfinite", "critical"), ("nonfinite", "warn")},
        *{("loss_scale_drop", "warn"), ("clip_rate", "warn")},
    }


MESSAGES: dict[str, tuple[Detector, list[StepRecord]]] = {
    "loss 3 is 1.5 times the mean 2 of the 3 values before it": (
        Spike(window=3),
        of_loss([1, 2, 3, 3]),
    ),
    "loss 9 is more than 7 robust standard deviations above the median 2 of the 3 values before "
    "it": (RobustSpike("loss", window=3), of_loss([2, 2, 2.5, 9])),
    "the last 2 values of loss lie between 4 and 5, 2 and 2.5 times the median 2 of the 6 before "
    "them": (ShortSustained(window=2), of_loss([2, 2, 2, 2, 2, 2, 5, 4])),
    "the median 3 of the last 2 values of loss is 1.5 times the best so far, 2": (
        Drift(window=2),
        of_loss([2, 2, 4]),
    ),
    "1 gradient element is NaN or infinite; the step was skipped": (
        NonFinite(),
        [StepRecord(0, nonfinite_count=1, skipped=True)],
    ),
    "the loss scale fell from 4 to 2, and at least 2 times in the last 9 steps": (
        LossScaleDrop(2, 9),
        scales(8, 4, 2),
    ),
    "the last 3 updates were skipped": (
        Skips(3),
        [StepRecord(i, skipped=True) for i in range(3)],
    ),
    "75 % of the last 4 steps were clipped": (
        ClipRate(window=4),
        [StepRecord(i, clipped=i > 0) for i in range(4)],
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(message: str) -> None:
    detector, records = MESSAGES[message]
    assert [event.message for event in verdicts(detector, records)] == [message]


SHIPPED = [*default_detectors(), Skips(1)]


@pytest.mark.parametrize("detector", SHIPPED, ids=lambda d: type(d).__name__)
def test_is_pure(detector: Detector) -> None:
    """A state is not changed by a call, survives a pickle, and gives the same any time."""
    states, answers = [detector.init()], []
    records = incident_log(1200)
    for record in records:
        state, events = detector(states[-1], record)
        states.append(state)
        answers.append(events)
    for i in [1199, 3, 700, 700, 150, 1120, 502]:
        for state in (states[i], pickle.loads(pickle.dumps(states[i]))):
            again, events = detector(state, records[i])
            assert again == states[i + 1]
            assert repr(events) == repr(answers[i])  # NaN is not equal to itself


@pytest.mark.parametrize("detector", SHIPPED, ids=lambda d: type(d).__name__)
def test_states_are_plain_and_bounded(detector: Detector) -> None:
    def require_plain(state: Any) -> None:
        assert type(state) in (tuple, float, int, str, bool, type(None))
        if isinstance(state, tuple):
            for part in state:
                require_plain(part)

    state, sizes = detector.init(), []
    for record in healthy(3000):
        state, _ = detector(state, record)
        sizes.append(len(pickle.dumps(state)))
    require_plain(state)
    assert max(sizes[1500:]) <= max(sizes[:1500]) + 20


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_bad_values_change_no_later_verdict(data: st.DataObject) -> None:
    """NaN, infinities or nothing in any metric, anywhere: the others are judged as without."""
    records = incident_log(400)
    inserted = data.draw(st.dictionaries(st.integers(0, 399), st.sampled_from(BAD), max_size=20))
    spoilt = []
    for i, record in enumerate(records):
        if i in inserted:
            bad = dict.fromkeys((*METRICS, "loss_scale"), inserted[i])
            spoilt.append(StepRecord(1000 + i, **bad))
        spoilt.append(record)
    for detector in default_detectors():
        events = [e for e in verdicts(detector, spoilt) if e.step < 1000]
        assert repr(events) == repr(verdicts(detector, records))


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_of_the_metric_does_not_matter(factor: float) -> None:
    records = incident_log(800)
    scaled = changed(
        records,
        (range(800), "loss", lambda x: x and x * factor),
        (range(800), "grad_norm", lambda x: x and x * factor),
    )
    for detector in default_detectors()[:5]:
        steps = [event.step for event in verdicts(detector, records)]
        assert [event.step for event in verdicts(detector, scaled)] == steps


REFUSED: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, "metric must be one of loss, .*got 'los'", lambda: Spike("los")),
    (ValueError, "metric .*got 'step'", lambda: RobustSpike("step")),
    (ValueError, "metric .*got 'clipped'", lambda: Drift("clipped")),
    (ValueError, "metric .*got None", lambda: Sustained(None)),  # type: ignore[arg-type]
    (ValueError, "window must be a whole number of at least 1, got 0", lambda: Spike(window=0)),
    (ValueError, "window .*got -3", lambda: RobustSpike("loss", window=-3)),
    (ValueError, "window .*got 0", lambda: Sustained(window=0)),
    (ValueError, "window .*got 0", lambda: Drift(window=0)),
    (ValueError, "window .*got 0", lambda: ClipRate(window=0)),
    (ValueError, "window .*got 0", lambda: LossScaleDrop(window=0)),
    (TypeError, "window .*got 2.5", lambda: Spike(window=2.5)),  # type: ignore[arg-type]
    (ValueError, "ratio must be a finite number over 0, got nan", lambda: Spike(ratio=NAN)),
    (ValueError, "ratio .*got inf", lambda: Drift(ratio=INF)),
    (TypeError, "ratio .*got '2'", lambda: Spike(ratio="2")),  # type: ignore[arg-type]
    (ValueError, "k .*got 0", lambda: RobustSpike("loss", k=0)),
    (ValueError, "critical .*got -1", lambda: Sustained(critical=-1)),
    (ValueError, "sustained .*got nan", lambda: Sustained(sustained=NAN)),
    (ValueError, "over must be a share .*got 1", lambda: ClipRate(over=1)),
    (ValueError, "streak .*got 0", lambda: Skips(0)),
    (ValueError, "level must be .*got 'bad'", lambda: Skips(level="bad")),  # type: ignore[arg-type]
    (ValueError, "drops .*got 0", lambda: LossScaleDrop(drops=0)),
    (ValueError, "5 drops do not fit into a window of 4", lambda: LossScaleDrop(5, 4)),
    (ValueError, "level .*'info', 'warn', 'critical', got 'error'", lambda: event("error")),
]


def event(level: Any) -> Event:
    return Event(0, "mine", level, "loss", 1.0)


@pytest.mark.parametrize(("error", "text", "make"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_refuses(error: type[Exception], text: str, make: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        make()
