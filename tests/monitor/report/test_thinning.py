"""Series of bounded length: nothing is lost while they are short, and never a spike."""

import random

import pytest

from fastclip.monitor.report.thinning import Thinned


def filled(values: list[float], buckets: int) -> Thinned:
    series = Thinned(buckets)
    for step, value in enumerate(values):
        series.add(step, 0, value)
    return series


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100])
def test_a_short_series_is_whole(count: int) -> None:
    values = [float(step * 7919 % 101) for step in range(count)]
    series = filled(values, 100)
    assert [(point.step, point.value) for point in series.points()] == list(enumerate(values))
    assert (series.count, series.width) == (count, 1)


@pytest.mark.parametrize("count", [101, 1000, 12_345])
def test_a_long_one_keeps_the_extremes_of_equal_stretches(count: int) -> None:
    noise = random.Random(count)
    values = [noise.gauss(0, 1) for _ in range(count)]
    series = filled(values, 100)
    assert series.width == 2 ** max(0, (-(-count // 100) - 1).bit_length())
    expected = set()
    for start in range(0, count, series.width):
        stretch = range(start, min(start + series.width, count))
        expected |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    points = series.points()
    assert {point.step for point in points} == expected | {count - 1}
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert all(values[point.step] == point.value for point in points)
    assert len(points) <= 201


@pytest.mark.parametrize("place", [0, 1, 50_000, 99_998, 99_999])
def test_no_spike_is_lost(place: int) -> None:
    values = [1.0] * 100_000
    values[place] = 9.0
    assert (place, 9.0) in [(point.step, point.value) for point in filled(values, 50).points()]


def test_attempts_and_notes_come_along() -> None:
    series = Thinned(2)
    for attempt in range(3):
        for step in range(4):
            series.add(step, attempt, float(step == 2), f"{attempt}/{step}")
    assert [(point.attempt, point.step) for point in series.points() if point.value] == [
        (0, 2),
        (2, 2),
    ]
    assert all(point.note == f"{point.attempt}/{point.step}" for point in series.points())
