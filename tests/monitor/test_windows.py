"""Windows against slices of a list, and the statistics of their values against `statistics`."""

import math
import pickle
import statistics
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastclip.monitor import robust
from fastclip.monitor.windows import EMPTY, Ordered, Summed, Window, values_of, window_of

finite = st.floats(allow_nan=False, allow_infinity=False)
ordinary = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
sizes = st.integers(1, 40)


def pushed(windows: Ordered, window: Window, value: float) -> Window:
    window, values = windows.take(window)
    return windows.push(window, values, value)


@given(sizes, st.lists(finite, max_size=100))
def test_ordered_holds_the_last_values(size: int, stream: list[float]) -> None:
    windows, window = Ordered(size), EMPTY
    for i, value in enumerate(stream):
        window = pushed(windows, window, value)
        last = stream[max(0, i + 1 - size) : i + 1]
        assert values_of(window) == last
        assert windows.take(window)[1] == sorted(last)


@given(sizes, st.lists(finite, min_size=1, max_size=100))
@example(3, [1e308, 1.0, 1e-300, -5e-324, 2.0, 3.0, 4.0])
@example(2, [1.7e308, 1.7e308, 1.7e308])
def test_summed_has_the_exact_mean(size: int, stream: list[float]) -> None:
    windows, window = Summed(size), EMPTY
    for i, value in enumerate(stream):
        window, total = windows.take(window)
        window = windows.push(window, total, value)
        last = stream[max(0, i + 1 - size) : i + 1]
        assert (values_of(window), total.count) == (last, len(last))
        assert total.mean() == float(sum(map(Fraction, last)) / len(last))


@given(st.integers(1, 40), st.lists(ordinary, min_size=2, max_size=100), st.data())
def test_any_earlier_window_can_be_gone_on_from(
    size: int, stream: list[float], data: st.DataObject
) -> None:
    """Out of turn, twice, by another object, or pickled: the same as in turn."""
    windows, made = Ordered(size), [EMPTY]
    for value in stream:
        made.append(pushed(windows, made[-1], value))
    for _ in range(5):
        i = data.draw(st.integers(0, len(stream) - 1))
        assert pushed(windows, made[i], stream[i]) == made[i + 1]
        copied: Window = pickle.loads(pickle.dumps(made[i]))
        assert pushed(Ordered(size), copied, stream[i]) == made[i + 1]
        branch = pushed(windows, made[i], -7.5)
        assert values_of(branch) == [*stream[:i], -7.5][-size:]
        assert windows.take(branch)[1] == sorted(values_of(branch))


def test_what_is_taken_has_one_owner() -> None:
    windows = Ordered(5)
    window = pushed(windows, pushed(windows, EMPTY, 2.0), 1.0)
    _, mine = windows.take(window)
    _, other = windows.take(window)
    mine.append(9.0)
    assert other == [1.0, 2.0]


def test_what_is_remembered_is_of_one_window_alone() -> None:
    """Also after it was pickled with that; an equal window is another one."""
    windows = Ordered(5)
    window = pushed(windows, pushed(windows, EMPTY, 2.0), 1.0)
    for holder in (windows, pickle.loads(pickle.dumps(windows))):
        other = window_of([7.0, 6.0])
        assert holder.take(other) == (other, [6.0, 7.0])
        assert holder.take(window) == (window, [1.0, 2.0])


def test_zeros_of_either_sign_are_the_same() -> None:
    """Else the median of a resumed window might be -0.0 where it was 0.0."""
    windows, window = Ordered(3), EMPTY
    for value in [-0.0, 0.0, 1.0, -0.0, 2.0]:
        window = pushed(windows, window, value)
        again: Window = pickle.loads(pickle.dumps(window))
        assert repr(Ordered(3).take(again)[1]) == repr(windows.take(window)[1])
    assert repr(values_of(window)) == "[1.0, 0.0, 2.0]"


def test_the_median_of_the_largest_numbers_is_finite() -> None:
    assert robust.median([1.7e308, 1.79e308]) == 1.745e308
    assert robust.median([-1.7e308, 1.7e308]) == 0.0


@pytest.mark.parametrize("smaller", [1, 7, 16, 40])
def test_a_window_of_a_larger_size_is_cut(smaller: int) -> None:
    stream = [float(7 * i % 50) for i in range(50)]
    windows = Ordered(smaller)
    window, values = windows.take(window_of(stream))
    assert (values_of(window), values) == (stream[-smaller:], sorted(stream[-smaller:]))
    window = windows.push(window, values, 3.5)
    assert values_of(window) == [*stream[1 - smaller :], 3.5][-smaller:]


def test_windows_share_what_they_have_in_common() -> None:
    """2,000 windows of 10,000 values take no 2,000 times the memory of one."""
    windows, window, made = Ordered(10_000), window_of(map(float, range(10_000))), []
    for i in range(2000):
        window = pushed(windows, window, float(i))
        made.append(window)
    blocks = {id(block) for blocks, _, _ in made for block in blocks}
    assert len(blocks) == (10_000 + 2000) // 16


@given(st.lists(ordinary, min_size=1, max_size=60))
def test_median_and_mad(values: list[float]) -> None:
    values.sort()
    middle = statistics.median(values)
    assert robust.median(values) == middle
    wanted = statistics.median(abs(value - middle) for value in values)
    assert robust.mad(values, middle) == wanted


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=60))
def test_median_and_mad_of_logarithms(values: list[float]) -> None:
    values.sort()
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    assert robust.center(values, log=True) == middle
    wanted = statistics.median(abs(log - middle) for log in logs)
    assert robust.mad(values, middle, math.log) == wanted


def z(values: list[float], value: float) -> float:
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    above, least = value - middle, max(spread, 1e-3 * abs(middle))
    return above / least if least else math.copysign(math.inf, above) if above else 0.0


@given(st.lists(ordinary, min_size=1, max_size=60), ordinary, st.floats(0.5, 10))
def test_exceeds_is_the_robust_z_score(values: list[float], value: float, k: float) -> None:
    values.sort()
    score = z(values, value)
    if not math.isclose(score, k):  # there a rounding decides
        assert robust.exceeds(values, value, k) == (score > k)


@pytest.mark.parametrize(
    ("level", "log"),
    [(2.5, False), (-2.5, False), (1e-30, False), (1e30, False), (2.5, True), (1e-30, True)],
)
def test_a_constant_series_has_the_least_spread(level: float, log: bool) -> None:
    """k = 7 times 1e-3: a rise of 0.7 % is noise, a little more is a jump."""
    values = [level] * 100
    assert not robust.exceeds(values, level, 7, log)
    assert not robust.exceeds(values, level + 0.0069 * abs(level), 7, log)
    assert robust.exceeds(values, level + 0.0071 * abs(level), 7, log)
