"""Onsets against the definition of the normal bands, and at its edges."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import StepRecord
from fastclip.monitor.bands import Bands
from fastclip.monitor.records import WATCHED
from tests.monitor import reference
from tests.monitor.making import healthy, incident_log, of_loss

NAN = math.nan


def onsets(records: list[StepRecord]) -> list[tuple[int, str] | None]:
    bands = Bands()
    state, found = bands.init(), []
    for record in records:
        state, onset = bands(state, record)
        found.append(onset)
    return found


def row(record: StepRecord) -> dict[str, float]:
    values = {metric: getattr(record, metric) for metric in WATCHED}
    return {metric: value for metric, value in values.items() if value is not None}


def test_is_its_definition_on_a_long_log() -> None:
    records = incident_log()
    found = onsets(records)
    assert found == reference.onsets([row(record) for record in records])
    starts = sorted({onset for onset in found if onset})
    assert starts[:2] == [(150, "loss"), (300, "loss")]
    assert (700, "activation_max") in starts


jumpy = st.sampled_from([1.0, 1.01, 1.02, 1.1, 3.0, 50.0, -2.0, 0.0, None, NAN, math.inf])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(jumpy, jumpy), max_size=150))
def test_is_its_definition(pairs: list[tuple[float | None, float | None]]) -> None:
    calm = [(1.0 + 0.01 * (i % 3), 2.0 + 0.01 * (i % 5)) for i in range(25)]
    records = [StepRecord(i, loss, grad_norm=norm) for i, (loss, norm) in enumerate(calm + pairs)]
    assert onsets(records) == reference.onsets([row(record) for record in records])


def steady(length: int) -> list[float]:
    return [1.0 + 0.01 * (i % 5) for i in range(length)]


def test_judged_once_twenty_are_stored() -> None:
    assert onsets(of_loss([*steady(19), 9.0]))[-1] is None
    assert onsets(of_loss([*steady(20), 9.0]))[-1] == (20, "loss")
    assert onsets(of_loss([NAN])) == [(0, "loss")]  # at once


def test_upwards_only_and_any_sign() -> None:
    assert onsets(of_loss([*steady(50), 0.1, -5.0]))[-2:] == [None, None]
    negative = [x - 3 for x in steady(50)]
    assert onsets(of_loss([*negative, -1.5]))[-1] == (50, "loss")


def test_an_excursion_ends_with_the_tenth_record_inside() -> None:
    values = [*steady(50), 9.0, *steady(12)]
    assert onsets(of_loss(values))[50:] == [(50, "loss")] * 10 + [None] * 3
    again = [*steady(50), 9.0, *steady(9), 8.0, *steady(10)]
    assert onsets(of_loss(again))[50:] == [(50, "loss")] * 20 + [None]


def test_a_new_level_becomes_normal_after_a_hundred_records() -> None:
    values = steady(50) + [9.0 + x for x in steady(150)]
    found = onsets(of_loss(values))
    assert found[49:51] == [None, (50, "loss")]
    # The 100th outside is at 149; ten more inside end the excursion.
    assert found[158:160] == [(50, "loss"), None]
    assert onsets(of_loss([*values, 1.0]))[-1] is None
    assert onsets(of_loss([*values, 30.0]))[-1] == (200, "loss")


def test_the_first_metric_in_order_gives_its_name() -> None:
    records = healthy(60)
    factors = {"grad_norm": 30.0, "update_ratio": 40.0}
    for name, factor in factors.items():
        records[55] = replace(records[55], **{name: factor * getattr(records[55], name)})
    assert onsets(records)[55] == (55, "grad_norm")


@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_hardly_leave_their_bands(seed: int) -> None:
    assert sum(onset is not None for onset in onsets(healthy(2000, seed))) == 0
