"""A run beside a healthy one: which records are paired, and the numbers of both."""

import math
import random
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from fastclip.monitor import StepRecord, diagnose, suggest_max_norm
from fastclip.monitor.diagnosis.baseline import SAMPLE, Sample, in_step, newest
from fastclip.monitor.diagnosis.result import Compared
from tests.monitor.diagnosis.cases import FOLLOWS, NORM, RISE, SPIKE, S
from tests.monitor.making import changed, healthy, of_loss, times

GOOD = 7  # seed of the baseline


def compared(records: list[StepRecord], baseline: list[StepRecord]) -> dict[str, Compared]:
    return {row.quantity: row for row in diagnose(records, baseline).comparison}


def steps(*numbers: int) -> list[StepRecord]:
    return [StepRecord(number) for number in numbers]


PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int]]] = {
    "the-same": ((0, 1, 2), (0, 1, 2), [0, 1, 2]),
    "sparse": ((0, 5, 10), tuple(range(12)), [0, 5, 10]),
    "one-shorter": ((0, 1, 2, 3), (0, 1), [0, 1]),
    "one-starts-later": ((3, 4, 5), (0, 1, 2, 3, 4), [3, 4]),
    "nothing-in-common": ((0, 2), (1, 3), []),
    "the-log-goes-back": ((0, 1, 2, 1, 2, 3), (0, 1, 2, 3), [0, 1, 2, 3]),
    "the-baseline-goes-back": ((0, 1, 2, 3), (0, 1, 2, 1, 2, 3), [0, 1, 2, 3]),
    "both-go-back": ((0, 1, 2, 1, 2, 3), (0, 1, 1, 2, 3), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    log, baseline, expected = PAIRS[name]
    found = list(in_step(steps(*log), steps(*baseline)))
    assert [one.step for one, other in found if one and other] == expected
    assert [one.step for one, _ in found if one] == [*log]
    assert [other.step for _, other in found if other] == [*baseline]
    assert all(one.step == other.step for one, other in found if one and other)


NEWEST: dict[str, tuple[list[tuple[int, int]], int, list[tuple[int, int]]]] = {
    # pairs of step and attempt, records that wait, and what is left
    "once": ([(0, 0), (1, 0), (5, 0)], 10, [(0, 0), (1, 0), (5, 0)]),
    "run-again": ([(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)], 10, [(0, 0), (1, 1), (2, 1)]),
    "not-run-again": ([(0, 0), (1, 0), (2, 0), (0, 1)], 10, [(0, 1)]),
    "the-same-step": ([(0, 0), (0, 1), (0, 2), (1, 2)], 10, [(0, 2), (1, 2)]),
    "just-in-time": ([(0, 0), (1, 0), (2, 0), (1, 1)], 2, [(0, 0), (1, 1)]),
    "too-far-back": ([(0, 0), (1, 0), (2, 0), (0, 1)], 2, [(0, 0), (0, 1)]),
}


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_attempt_at_each_step(name: str) -> None:
    log, held, expected = NEWEST[name]
    found = newest((StepRecord(step, attempt=attempt) for step, attempt in log), held)
    assert [(record.step, record.attempt) for record in found] == expected


def test_a_repaired_run_is_compared_as_it_was_run_last() -> None:
    """The first attempt ends in NaN; the second, from step 700 on, is as the baseline."""
    good = healthy(1200, GOOD)
    failed = changed(healthy(1000), (range(S, 1000), "loss", math.nan))
    repaired = [replace(record, attempt=1) for record in good[700:]]
    rows = compared(failed + repaired, good)
    assert rows["steps in common"][1:3] == (1200, 1200)
    last = rows["loss, median of the last 100"]
    assert last.log == last.baseline == median(r.loss or 0 for r in good[-100:])
    assert last.note == "never above the baseline's band at 1,180 steps"


def test_quantiles_are_exact_as_long_as_all_is_kept() -> None:
    sample, noise = Sample(), random.Random(0)
    values = [noise.gauss(0, 1) for _ in range(1000)]
    for value in values:
        sample.add(value)
        sample.add(math.nan)
        sample.add(None)
    ordered = sorted(values)
    for share, place in ((0.0, 0), (0.5, 499), (0.9, 899), (0.99, 989), (1.0, 999)):
        assert sample.quantile(share) == ordered[place]
    assert Sample().quantile(0.5) is None


def test_a_long_series_is_thinned_evenly() -> None:
    sample = Sample()
    for value in range(100_000):
        sample.add(float(value))
    assert len(sample._values) < SAMPLE
    assert sample.quantile(0.5) == pytest.approx(50_000, rel=1e-3)
    assert sample.quantile(0.99) == pytest.approx(99_000, rel=1e-3)


def test_the_numbers_of_both_runs() -> None:
    log, good = changed(healthy(1200), NORM, FOLLOWS), healthy(1200, GOOD)
    rows = compared(log, good)
    assert rows["steps in common"][1:3] == (1200, 1200)
    for quantity, name, share in (
        ("loss, median", "loss", 0.5),
        ("raw gradient norm, median", "grad_norm", 0.5),
        ("raw gradient norm, 90% quantile", "grad_norm", 0.9),
        ("raw gradient norm, largest", "grad_norm", 1.0),
        ("effective update, median", "update_ratio", 0.5),
    ):
        place = math.ceil(share * 1200) - 1
        expected = tuple(sorted(getattr(r, name) for r in run)[place] for run in (log, good))
        assert rows[quantity][1:3] == expected
    last = tuple(median(r.loss or 0 for r in run[-100:]) for run in (log, good))
    assert rows["loss, median of the last 100"][1:3] == last
    shares = tuple(sum(bool(r.clipped) for r in run) / 1200 for run in (log, good))
    assert rows["share of steps clipped"][1:3] == shares
    assert rows["share of steps skipped"][1:3] == (0, 0)
    assert rows["times the loss left and came back"][1:3] == (1, 0)
    assert rows["recovery after these, the longest"][1:3] == (6, 0)
    assert rows["seconds a step, median"][1:3] == (None, None)


PARTED: dict[str, tuple[Any, str]] = {
    "never": ([], "never above the baseline's band at 1,180 steps"),
    "for-a-step": ([SPIKE], "above the baseline's band at 1 of 1,180 steps, first at step 800 "),
    "for-good": ([RISE], "the runs part at step 800 (10 in a row)"),
    "not-finite": ([(range(S, 1200), "loss", math.nan)], "first at step 800 (nan against "),
}


@pytest.mark.parametrize("name", PARTED)
def test_where_the_runs_part(name: str) -> None:
    changes, expected = PARTED[name]
    row = compared(changed(healthy(1200), *changes), healthy(1200, GOOD))
    note = row["loss, median of the last 100"].note
    assert expected in note
    assert ("never 10 in a row" in note) == (name == "for-a-step")


def test_a_loss_that_ends_in_nan_has_no_final_value() -> None:
    log = changed(healthy(300), (range(200, 300), "loss", math.nan))
    last = compared(log, healthy(300, GOOD))["loss, median of the last 100"]
    assert last.log is not None
    assert math.isnan(last.log)
    assert last.baseline == pytest.approx(3.3, abs=0.2)


def test_updates_without_update_ratio() -> None:
    log = changed(healthy(400), ([100], "skipped", True))
    bare = [replace(record, update_ratio=None) for record in log]
    row = compared(bare, healthy(400, GOOD))["effective update, median"]
    products = sorted(
        (r.lr or 0) * (r.clip_coef or 0) * (r.grad_norm or 0) for r in bare if not r.skipped
    )
    assert row.log == products[math.ceil(len(products) / 2) - 1]
    assert row.note.startswith("lr x clip_coef x grad_norm, for lack of update_ratio")
    barer = [replace(record, clip_coef=None) for record in bare]
    row = compared(barer, healthy(400, GOOD))["effective update, median"]
    assert (row.log, row.note) == (None, "needs update_ratio, or lr, clip_coef and grad_norm")
    assert row.baseline is not None


def test_throughput_where_batches_tell_the_time() -> None:
    def timed(seconds: float) -> list[StepRecord]:
        start = 1.7e9
        return [replace(r, batch={"time": start + seconds * r.step}) for r in healthy(100)][::5]

    assert compared(timed(0.5), timed(0.25))["seconds a step, median"][1:3] == (0.5, 0.25)
    row = compared(timed(0.5), healthy(100))["seconds a step, median"]
    assert row[1:3] == (0.5, None)


def test_steps_in_common_alone_count() -> None:
    log = changed(healthy(1200), (range(600, 1200), "loss", times(100)))
    rows = compared(log, healthy(600, GOOD))
    assert rows["steps in common"][1:3] == (600, 600)
    assert (rows["loss, median"].log or 0) < 6
    none = compared(of_loss([1.0] * 10), [StepRecord(100, 1.0)])
    assert none["steps in common"].note == (
        "the logs have no step in common: only the runs as a whole are compared"
    )
    assert "loss, median" not in none


def test_logs_without_losses() -> None:
    rows = compared(steps(*range(50)), healthy(50))
    assert rows["loss, median of the last 100"].log is None
    assert rows["loss, median of the last 100"].note == (
        "where they part is not known: too few losses in common"
    )
    assert rows["times the loss left and came back"].log is None


def test_the_baseline_decides_nothing_and_lends_its_norms() -> None:
    log, good = changed(healthy(1200), NORM, FOLLOWS), healthy(2000, GOOD)
    alone, beside = diagnose(log), diagnose(log, good)
    assert beside[:2] + beside[4:8] == alone[:2] + alone[4:8]
    threshold = suggest_max_norm(record.grad_norm for record in good).max_norm
    assert f"max_norm={threshold:.4g})" in beside.interventions[0]
    assert "2,000 norms of the baseline" in beside.interventions[0]
