"""Numbers at the ends of what a float holds, steps of any size, and settings at their limits."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import (
    Drift,
    Event,
    Monitor,
    RobustSpike,
    Spike,
    StepRecord,
    Sustained,
    default_detectors,
)
from tests.monitor.making import incident_log, of_loss, verdicts
from tests.monitor.test_resuming import observed

LARGEST, SMALLEST = 1.7976931348623157e308, 5e-324


def every_kind(window: int) -> list[Any]:
    return [
        *(Spike(window=window), RobustSpike("loss", window=window), Sustained(window=window)),
        *(RobustSpike("loss", window=window, log=True), Drift(window=window)),
    ]


LEVELS: dict[str, tuple[float, float]] = {  # a level, and one over 1.5 times that
    "largest": (1e308, LARGEST),
    "smallest": (SMALLEST, 4 * SMALLEST),
    "denormal": (1e-310, 2e-310),
    "past-2**53": (2.0**60 + 2**8, 2.0**61),
    "float32": (3e38, 6e38),
}


@pytest.mark.parametrize("window", [1, 2, 30])
@pytest.mark.parametrize("name", LEVELS)
def test_alarms_at_any_level(name: str, window: int) -> None:
    low, high = LEVELS[name]
    for detector in every_kind(window):
        events = verdicts(detector, of_loss([low] * 150 + [high] * window))
        assert events, detector
        assert events[0].baseline == pytest.approx(low, rel=1e-12, abs=0)
        for event in events:
            assert event.baseline is not None
            assert low * 0.999 <= event.baseline < event.value <= high
        assert verdicts(detector, of_loss([low] * 300)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40))
def test_no_number_breaks_a_detector_or_gives_one_that_is_none(values: list[float]) -> None:
    calm = [1.0, 1.5, 1.25, 1.75] * 30
    for window in (1, 3):
        for detector in every_kind(window):
            for event in verdicts(detector, of_loss([*calm, *values])):
                assert math.isfinite(event.value)
                assert event.baseline is not None
                assert math.isfinite(event.baseline)


def test_zeros_of_either_sign_and_logarithms() -> None:
    zeros = [0.0, -0.0] * 80
    for detector in every_kind(10):
        assert verdicts(detector, of_loss(zeros)) == []
    [event] = verdicts(RobustSpike("loss"), of_loss([*zeros, SMALLEST]))
    assert (event.value, repr(event.baseline)) == (SMALLEST, "0.0")
    assert verdicts(RobustSpike("loss", log=True), of_loss([*zeros, 1.0])) == []


def test_ratios_below_one_and_tiny_k_fire_all_the_time() -> None:
    constant = of_loss([1.0] * 120)
    assert [e.step for e in verdicts(Spike(ratio=0.5), constant)] == list(range(100, 120))
    assert [e.step for e in verdicts(Drift(ratio=0.5), constant)] == list(range(50, 120))
    late = verdicts(Sustained(sustained=0.5, critical=0.5), constant)
    assert [e.step for e in late] == list(range(104, 120))
    assert verdicts(RobustSpike("loss", k=1e-300), constant) == []  # not above the median
    [event] = verdicts(RobustSpike("loss", k=1e-300), of_loss([1.0] * 100 + [1 + 1e-15]))
    assert event.step == 100
    assert verdicts(RobustSpike("loss", k=LARGEST), of_loss([1.0] * 100 + [1e300])) == []


@pytest.mark.parametrize("start", [0, -5000, 2**31 - 5, 2**53, 2**63, 10**30], ids=str)
def test_steps_of_any_size(start: int) -> None:
    def shifted(event: Event) -> tuple[Any, ...]:
        assert event.onset is not None
        return (event.step - start, event.kind, event.onset - start, event.onset_metric)

    records = incident_log(720)
    monitor, wanted = Monitor(), Monitor().replay(records)
    events = [e for r in records for e in observed(monitor, _moved(r, start))]
    assert list(map(shifted, events)) == [(e.step, e.kind, e.onset, e.onset_metric) for e in wanted]
    assert json.loads(json.dumps(monitor.state_dict()))["step"] == start + 719


def _moved(record: StepRecord, start: int) -> StepRecord:
    return StepRecord(**{**vars(record), "step": record.step + start})


def test_gaps_between_steps_do_not_matter() -> None:
    records = incident_log(720)
    apart = [StepRecord(**{**vars(r), "step": r.step**2}) for r in records]
    found = [(e.step, e.kind, e.onset) for e in Monitor().replay(apart)]
    wanted = [(e.step**2, e.kind, (e.onset or 0) ** 2) for e in Monitor().replay(records)]
    assert found == wanted


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, float, np.float32])
def test_steps_of_other_types_are_whole_numbers(kind: Any) -> None:
    monitor = Monitor()
    for step in range(3):
        monitor.observe(step=kind(step), loss=np.float32(1.5), clipped=np.bool_(True))
    state = monitor.state_dict()
    assert (type(state["step"]), state["step"]) == (int, 2)
    assert json.loads(json.dumps(state))["detectors"]["spike/loss/0"] == [[], [1.5] * 3, 0]


def test_two_monitors_in_turn_with_one_set_of_detectors_and_rollbacks() -> None:
    """Neither sees what the other's detectors remember of their last window."""
    detectors = default_detectors()
    monitors = [Monitor(detectors) for _ in range(3)]
    alone = [Monitor() for _ in range(3)]
    records = incident_log(900)
    for turn in range(1500):
        for place, (shared, own) in enumerate(zip(monitors, alone, strict=True)):
            step = (turn * (place + 1)) % 900 if turn % 50 else (turn // 7) % 900
            record = records[step]
            assert repr(observed(shared, record)) == repr(observed(own, record))
    for shared, own in zip(monitors, alone, strict=True):
        assert shared.state_dict() == own.state_dict()
