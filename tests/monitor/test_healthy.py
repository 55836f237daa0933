"""Healthy runs of many kinds: which detectors are silent, and which are not, and why."""

import math
import random
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from fastclip import monitor as package
from fastclip.monitor import ClipRate, Drift, Monitor, RobustSpike, StepRecord, detectors
from tests.monitor.making import changed, times
from tests.monitor.shapes import ROUGH, STEADY, language_model, made


def rough_set() -> list[Any]:
    """The set that the docstring gives, as a user would copy it."""
    assert detectors.__doc__ is not None
    code = textwrap.dedent(detectors.__doc__.split("::\n\n")[1].split("\n\nA loss")[0])
    found: list[Any] = eval(code, {n: getattr(package, n) for n in package.__all__})
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", STEADY)
def test_the_defaults_are_silent(shape: str, seed: int) -> None:
    assert Monitor().replay(made(shape, seed)) == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [*STEADY, *ROUGH])
def test_the_set_for_rough_losses_is_silent(shape: str, seed: int) -> None:
    assert Monitor(rough_set()).replay(made(shape, seed)) == []


@pytest.mark.parametrize("shape", ROUGH)
def test_the_set_for_rough_losses_sees_a_spike_and_a_divergence(shape: str) -> None:
    records = changed(made(shape, 0), ([1500], "loss", times(200)))
    events = Monitor(rough_set()).replay(records)
    assert [(e.step, e.kind, e.onset) for e in events] == [(1500, "robust_spike", 1500)]
    diverged = changed(made(shape, 0), (range(1500, 3000), "loss", times(300)))
    events = Monitor(rough_set()).replay(diverged)
    assert {event.kind for event in events} == {"robust_spike", "sustained", "drift"}
    first = next(event for event in events if event.level == "critical")
    assert 1500 <= first.step < 1550
    assert {event.onset for event in events if event.step < 1600} == {1500}


@pytest.mark.parametrize("shape", ROUGH)
def test_ratios_of_rough_losses_alarm(shape: str) -> None:
    """The definitions leave no choice, so the docs have another set for these: 10 % over the best
    of 3,000 medians of 50 such values is noise.
    """
    assert Monitor([Drift()]).replay(made(shape, 0)) != []
    assert Monitor([Drift(window=200, ratio=1.5)]).replay(made(shape, 0)) == []


def test_a_clipped_warm_up_is_told_and_ends() -> None:
    """At a threshold of 1 most of the first hundred steps are clipped, as they are meant to be."""
    records = [
        replace(record, clipped=record.grad_norm is not None and record.grad_norm > 1)
        for record in language_model(random.Random(0))
    ]
    events = Monitor().replay(records)
    assert {event.kind for event in events} == {"clip_rate"}
    assert [event.step for event in events] == list(range(99, events[-1].step + 1))
    assert events[-1].step < 160
    assert Monitor([ClipRate(over=0.95)]).replay(records) == []


@pytest.mark.parametrize(("digits", "told"), [(2, True), (3, False), (6, False)])
def test_norms_want_their_digits(digits: int, told: bool) -> None:
    """At 0.22 the second digit is 5 %; with more than half of a window equal, the MAD is 0."""
    noise = random.Random(0)
    norms = [round(0.222 * noise.lognormvariate(0, 0.02), digits) for _ in range(1000)]
    records = [StepRecord(step, grad_norm=norm) for step, norm in enumerate(norms)]
    assert bool(Monitor([RobustSpike("grad_norm", log=True)]).replay(records)) == told


@pytest.mark.parametrize("every", [1, 5, 10, 20])
def test_a_slow_divergence_is_seen_however_often_it_is_logged(every: int) -> None:
    """From 5.0 to 7.1 in 2,400 updates, after 3,000 that went well: Drift says so when the median
    of 50 is 10 % up, which is at step 3,600 and half a window.
    """
    noise = random.Random(every)
    records = [
        StepRecord(
            step,
            5 + 4 * math.exp(-step / 400) + 2.1 * max(0, step - 3000) / 2400 + noise.gauss(0, 0.1),
            grad_norm=noise.lognormvariate(0, 0.3),
        )
        for step in range(0, 5400, every)
    ]
    events = Monitor().replay(records)
    assert {event.kind for event in events} == {"drift"}
    assert 3500 < events[0].step < 3700 + 25 * every
    assert events[-1].step == records[-1].step
