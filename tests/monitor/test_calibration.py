"""Thresholds from norms: the share above them, what is too little, and what does not fit."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.monitor import suggest_max_norm
from fastclip.monitor.calibration import clip_rates, lowest_clip_rate
from fastclip.rules import LogZ
from tests.stepping import run


def spread(count: int, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [noise.lognormvariate(0, 0.5) for _ in range(count)]


@given(
    st.lists(st.integers(0, 30).map(float), min_size=100, max_size=300),
    st.sampled_from([0.1, 0.29, 0.3, 0.5, 0.7, 0.99]),
)
def test_clips_as_much_as_asked_for_and_never_more(norms: list[float], rate: float) -> None:
    found = suggest_max_norm(norms, rate)
    assert found.clip_rate == sum(norm > found.max_norm for norm in norms) / len(norms)
    assert found.clip_rate <= rate
    smaller = max((norm for norm in norms if norm < found.max_norm), default=-1.0)
    assert sum(norm > smaller for norm in norms) / len(norms) > rate
    assert found.samples == len(norms)


def test_by_hand() -> None:
    found = suggest_max_norm(map(float, range(1000)))
    assert found[:3] == (989.0, 0.01, 1000)
    assert found.drift == pytest.approx(749.5 / 249.5)
    assert suggest_max_norm(map(float, range(1, 101)), 0.1).max_norm == 90.0
    assert suggest_max_norm([1.0] * 1000) == (1.0, 0.0, 1000, 1.0, ())


def test_what_is_no_norm_is_left_out() -> None:
    norms = spread(1000)
    mixed: list[float | None] = []
    for i, norm in enumerate(norms):
        mixed += [norm, [None, math.nan, math.inf][i % 3]]
    assert suggest_max_norm(mixed) == suggest_max_norm(norms)


@pytest.mark.parametrize(
    ("factor", "warned"), [(1.9, False), (2.2, True), (0.52, False), (0.45, True)]
)
def test_drift(factor: float, warned: bool) -> None:
    norms = [*[1.0, 2.0, 3.0] * 200, *[factor, 2 * factor, 3 * factor] * 200]
    found = suggest_max_norm(norms)
    assert found.drift == pytest.approx(factor)
    expected = (
        f"the median norm of the second half is {factor:g} times that of the first: no fixed "
        "threshold fits both; an adaptive rule such as fastclip.rules.LogZ() follows the norm"
    )
    slope = abs(math.log(factor)) / 600
    rule = f"LogZ(halflife={math.log(2) ** 2 / 5 / slope:.0f})"
    assert found.warnings == ((expected.replace("LogZ()", rule),) if warned else ())


@pytest.mark.parametrize(
    ("count", "rule", "reached"),
    [(200, "LogZ(halflife=10)", 2.1), (600, "LogZ(halflife=28)", 2.0), (6000, "LogZ()", 1.3)],
)
def test_the_rule_for_a_drift(count: int, rule: str, reached: float) -> None:
    """Norms that fall to an eighth: with the half-life that is named, the threshold of LogZ is at
    the end twice the norm, and less where the default does."""
    norms = [8 ** (-step / count) for step in range(count)]
    found = suggest_max_norm(norms, 0.1)
    assert f"an adaptive rule such as fastclip.rules.{rule} follows" in found.warnings[0]
    halflife = float(rule[5:-1].removeprefix("halflife=") or 100)
    last = run(LogZ(halflife=halflife), [*norms, 1e3])[-1]
    assert last.threshold.item() / norms[-1] == pytest.approx(reached, rel=0.05)


def test_norms_of_zero() -> None:
    assert suggest_max_norm([0.0] * 500 + [1.0] * 500).drift == math.inf
    found = suggest_max_norm([0.0] * 1000)
    assert (found.max_norm, found.drift) == (0.0, 1.0)
    assert found.warnings == ("a threshold of 0 makes every gradient 0: most of these norms are 0",)


def test_numbers_of_numpy_come_back_as_python_has_them() -> None:
    found = suggest_max_norm(np.linspace(0, 1, 1001, dtype=np.float32))
    assert [type(value) for value in found[:4]] == [float, float, int, float]
    assert found.max_norm == pytest.approx(0.99)


def test_the_largest_and_the_smallest_norms() -> None:
    assert suggest_max_norm([1.7e308, 1.75e308] * 500)[:4] == (1.75e308, 0.0, 1000, 1.0)
    assert suggest_max_norm([5e-324, 1e-323] * 500)[:4] == (1e-323, 0.0, 1000, 1.0)


REFUSED: list[tuple[int, Any, type[Exception], str]] = [
    (999, 0.01, ValueError, "a clip rate of 0.01 needs at least 1000 gradient norms, got 999"),
    (0, 0.5, ValueError, "needs at least 20 gradient norms, got 0"),
    (33, 0.3, ValueError, "needs at least 34 gradient norms, got 33"),
    (33, 5e-324, ValueError, "needs at least 1000000000000000000 gradient norms, got 33"),
    (5000, 0.0, ValueError, "clip_rate must be a share over 0 and under 1, got 0.0"),
    (5000, 1, ValueError, "clip_rate .*got 1"),
    (5000, -0.1, ValueError, "clip_rate .*got -0.1"),
    (5000, math.nan, ValueError, "clip_rate .*got nan"),
    (5000, "0.01", TypeError, "clip_rate .*got '0.01'"),
]


@pytest.mark.parametrize(("count", "rate", "error", "text"), REFUSED, ids=lambda value: str(value))
def test_refuses(count: int, rate: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        suggest_max_norm(spread(count), rate)


def test_just_enough() -> None:
    assert suggest_max_norm(spread(1000)).samples == 1000
    assert suggest_max_norm(spread(34), 0.3).samples == 34


@pytest.mark.parametrize(
    ("count", "rate"),
    [(10, None), (11, None), (12, 0.9), (30, 0.4), (100, 0.1), (499, 0.03), (5000, 0.002)],
)
def test_the_lowest_rate_that_so_many_norms_can_tell(count: int, rate: float | None) -> None:
    norms = spread(count)
    assert lowest_clip_rate([None, *norms, math.nan]) == rate
    if rate is not None:
        assert suggest_max_norm(norms, rate).samples == count


def test_the_curve() -> None:
    curve = clip_rates([None, *spread(2000), math.nan])
    assert [rate for _, rate in curve] == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
    thresholds = [threshold for threshold, _ in curve]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[1] == suggest_max_norm(spread(2000)).max_norm
    assert clip_rates([1.0] * 19) == []
