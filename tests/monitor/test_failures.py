"""Known failures in known logs: what is said, from which step on, and what moved first."""

import math
from typing import Any

import pytest

from fastclip.monitor import Drift, Event, Monitor, RobustSpike, Spike, StepRecord, Sustained
from tests.monitor.making import changed, healthy, mixtral, times

ROBUST = [2425, 3735, 4050, 4055, 4575, 5300, 5305, 5875]


@pytest.fixture(scope="module")
def real() -> list[StepRecord]:
    return mixtral()


@pytest.mark.parametrize(
    ("detector", "steps"),
    [
        (Spike(ratio=1.5, window=100), [4050, 4055]),
        (RobustSpike("loss", k=7, window=100), ROBUST),
        (Sustained(), []),
        (Drift(), []),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_real_run(real: list[StepRecord], detector: Any, steps: list[int]) -> None:
    assert [event.step for event in Monitor([detector]).replay(real)] == steps


def test_a_real_run_with_the_defaults(real: list[StepRecord]) -> None:
    events = Monitor().replay(real)
    assert sorted({event.step for event in events}) == ROBUST
    assert {event.level for event in events} == {"warn"}
    onsets = {event.step: (event.onset, event.onset_metric) for event in events}
    expected = {step: (step, "loss") for step in ROBUST}
    assert onsets == expected | {4055: (4050, "loss"), 5305: (5300, "loss")}


@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_are_silent(seed: int) -> None:
    assert Monitor().replay(healthy(3000, seed)) == []


S = 800  # where the failures start
AFTER = range(S, 1200)

# What is changed, the kinds of the events, the first of them, and the metric that moved first at S.
FAILURES: dict[str, tuple[list[Any], set[str], int, str]] = {
    "isolated-spike": ([([S], "loss", times(1.8))], {"spike", "robust_spike"}, S, "loss"),
    "sustained": (
        [(AFTER, "loss", times(2))],
        {"spike", "robust_spike", "sustained", "drift"},
        S,
        "loss",
    ),
    "gradient-first": (
        [([S], "grad_norm", times(40)), (range(S + 3, S + 9), "loss", times(2))],
        {"robust_spike", "spike", "sustained"},
        S,
        "grad_norm",
    ),
    "activations-first": (
        [
            (AFTER, "activation_max", times(10)),
            (range(S + 4, 1200), "grad_norm", times(20)),
            (range(S + 6, 1200), "loss", math.nan),
        ],
        {"robust_spike", "nonfinite"},
        S + 4,
        "activation_max",
    ),
    "update-first": (
        [([S], "update_ratio", times(50)), ([S + 1], "loss", times(3))],
        {"spike", "robust_spike"},
        S + 1,
        "update_ratio",
    ),
    "parameters-first": (
        [(AFTER, "param_norm", times(1.2)), ([S + 5], "grad_norm", times(30))],
        {"robust_spike"},
        S + 5,
        "param_norm",
    ),
    "validation-first": (
        [([S], "val_loss", math.inf), ([S + 2], "loss", math.nan)],
        {"nonfinite"},
        S,
        "val_loss",
    ),
    "nan-loss": ([(AFTER, "loss", math.nan)], {"nonfinite"}, S, "loss"),
    "one-infinite-loss": ([([S], "loss", math.inf)], {"nonfinite"}, S, "loss"),
    "nan-gradients": (
        [
            ([S], "grad_norm", math.nan),
            ([S], "nonfinite_count", 3),
            (range(S + 1, 1200), "loss", math.nan),
            (range(S + 1, 1200), "grad_norm", math.nan),
        ],
        {"nonfinite"},
        S,
        "grad_norm",
    ),
    "activations-overflow": (
        [
            ([S], "activation_max", times(30)),
            (range(S + 1, 1200), "activation_max", math.inf),
            (range(S + 3, 1200), "loss", math.inf),
            (range(S + 4, 1200), "grad_norm", math.nan),
        ],
        {"nonfinite"},
        S + 1,
        "activation_max",
    ),
    "sudden-divergence": (
        [
            *(([S + i], "loss", times(1.5**i)) for i in range(2, 40)),
            *(([S + i], "grad_norm", times(2.0 ** (5 + i))) for i in range(40)),
            (range(S + 40, 1200), "loss", times(1e6)),
            (range(S + 40, 1200), "grad_norm", times(1e9)),
        ],
        {"robust_spike", "spike", "sustained", "drift"},
        S,
        "grad_norm",
    ),
    "learning-rate": (
        [
            (AFTER, "lr", times(100)),
            (AFTER, "update_ratio", times(100)),
            (range(S + 1, 1200), "loss", times(4)),
            (range(S + 2, 1200), "param_norm", times(1.5)),
            (range(S + 2, 1200), "grad_norm", times(15)),
        ],
        {"robust_spike", "spike", "sustained", "drift"},
        S + 1,
        "update_ratio",
    ),
    "dying-loss-scale": (
        [
            *(([S + i], "loss_scale", 2.0 ** (15 - i)) for i in range(16)),
            (range(S + 16, 1200), "loss_scale", 1.0),
            (AFTER, "nonfinite_count", 9),
            (AFTER, "grad_norm", math.inf),
            (AFTER, "skipped", True),
        ],
        {"nonfinite", "loss_scale_drop"},
        S,
        "grad_norm",
    ),
    "overflowing-gradients": (
        [
            (range(S, S + 5), "loss_scale", lambda x: x / 2),
            (range(S + 1, S + 5), "loss_scale", lambda x: x / 2),
            (range(S + 2, S + 5), "loss_scale", lambda x: x / 2),
            (range(S, S + 3), "grad_norm", math.inf),
            (range(S, S + 3), "nonfinite_count", 7),
            (range(S, S + 3), "skipped", True),
        ],
        {"nonfinite", "loss_scale_drop"},
        S,
        "grad_norm",
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("failure", FAILURES)
def test_the_onset_is_named(failure: str, seed: int) -> None:
    changes, kinds, first, metric = FAILURES[failure]
    events = Monitor().replay(changed(healthy(1200, seed), *changes))
    assert {event.kind for event in events} == kinds
    assert events[0].step == first
    early = [event for event in events if event.step < S + 100]
    assert {(event.onset, event.onset_metric) for event in early} == {(S, metric)}


def test_levels_of_a_divergence_and_of_skipped_steps() -> None:
    def highest(failure: str) -> str:
        events = Monitor().replay(changed(healthy(1200), *FAILURES[failure][0]))
        return "critical" if any(event.level == "critical" for event in events) else "warn"

    assert highest("sustained") == "critical"
    assert highest("nan-loss") == "critical"
    assert highest("nan-gradients") == "critical"
    assert highest("overflowing-gradients") == "warn"
    assert highest("dying-loss-scale") == "warn"
    assert highest("isolated-spike") == "warn"


def test_a_divergence_too_slow_for_any_window_of_the_past() -> None:
    """As in the stored run where loss went from 5.0 to 7.1 in 2,400 updates."""
    slowly = (([step], "loss", times(1 + (step - 1500) / 6000)) for step in range(1500, 4000))
    rising = changed(healthy(4000, 1), *slowly)
    events = Monitor().replay(rising)
    assert {event.kind for event in events} == {"drift"}
    drift = [event.step for event in events]
    assert 2100 < drift[0] < 2200  # 10 % above the best at 2,100, and half a window
    assert drift == list(range(drift[0], 4000))  # it keeps on saying so
    assert {(event.onset, event.onset_metric) for event in events[:1]} == {(drift[0], "loss")}


def test_most_steps_clipped() -> None:
    records = changed(healthy(1200), (AFTER, "clipped", True))
    events = Monitor().replay(records)
    assert {event.kind for event in events} == {"clip_rate"}
    first: Event = events[0]
    before = sum(bool(record.clipped) for record in records[first.step - 99 : first.step + 1])
    assert (first.value, before) == (0.51, 51)
    assert (first.onset, first.onset_metric) == (first.step, "clipped")


def test_a_loss_scale_that_falls_without_a_word_of_the_gradients() -> None:
    """Scales alone have no band: the onset is the drop that was one too many."""
    falls = (([S + 20 * i], "loss_scale", 2.0 ** (15 - i)) for i in range(4))
    records = changed(healthy(1200), *falls)
    for i in range(4):
        records = changed(
            records, (range(S + 20 * i, S + 20 * i + 20), "loss_scale", 2.0 ** (15 - i))
        )
    events = Monitor().replay(records)
    assert [(e.step, e.kind, e.onset, e.onset_metric) for e in events] == [
        (S + 20 * i, "loss_scale_drop", S + 20 * i, "loss_scale") for i in (2, 3)
    ]


def test_validation_that_goes_its_own_way() -> None:
    """The defaults judge the training loss, which is fine; a detector of `val_loss` sees it."""
    rising = (
        ([step], "val_loss", times(1.04 ** ((step - 1450) / 50))) for step in range(1500, 3000, 50)
    )
    records = changed(healthy(3000), *rising)
    assert Monitor().replay(records) == []
    events = Monitor([Drift("val_loss", window=5)]).replay(records)
    # The first median of five over 1.1 times the best is that with the third of 1.04 ** 3 or more.
    assert [event.step for event in events] == list(range(1700, 3000, 50))
    assert {event.onset_metric for event in events} == {"val_loss"}
    # In a log of validations alone an excursion lasts from one to the next.
    alone = [record for record in healthy(3000) if record.val_loss is not None]
    worse = changed(alone, (range(30, 60), "val_loss", times(9)))
    events = Monitor([Drift("val_loss", window=5)]).replay(worse)
    assert [event.step for event in events] == list(range(1600, 3000, 50))
    assert {(event.onset, event.onset_metric) for event in events} == {(1500, "val_loss")}
