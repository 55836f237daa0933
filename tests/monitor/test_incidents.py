"""What one would call one thing is one incident."""

from hypothesis import given
from hypothesis import strategies as st

from fastclip.monitor import Event
from fastclip.monitor.incidents import Incident, incidents, merged
from fastclip.monitor.records import LEVELS, Level


def event(step: int, onset: int, kind: str = "spike", level: Level = "warn") -> Event:
    return Event(step, kind, level, "loss", 1.0, 1.0, onset, "loss", f"{kind} at {step}")


def test_events_close_together_or_of_one_onset_are_one() -> None:
    events = [
        *(event(5, 5), event(5, 5, "drift"), event(7, 7), event(40, 7, "sustained", "critical")),
        *(event(41, 7), event(60, 60), event(10, 10)),
    ]
    assert incidents(events, gap=2) == [
        Incident(
            *(5, 41, 5, "loss", "critical", ("spike", "drift", "sustained"), 5),
            "sustained at 40",
        ),
        Incident(60, 60, 60, "loss", "warn", ("spike",), 1, "spike at 60"),
        Incident(10, 10, 10, "loss", "warn", ("spike",), 1, "spike at 10"),
    ]
    assert incidents([], gap=2) == []


def test_an_incident_is_of_one_attempt() -> None:
    events = [event(100, 100), event(101, 101), event(101, 101), event(103, 103)]
    found = incidents(events, 10, attempts=[0, 0, 1, 1])
    assert [(one.first, one.last, one.attempt) for one in found] == [(100, 101, 0), (101, 103, 1)]


def test_clip_rates_are_incidents_of_their_own() -> None:
    """Neither swallows the other, though they go on at the same time."""
    events = [event(step, step, "clip_rate") for step in range(100, 400)]
    events[150:150] = [event(250, 250), event(250, 248, "robust_spike")]
    events[222:222] = [event(320, 320, "nonfinite", "critical")]
    found = incidents(events, gap=10)
    assert [(one.first, one.last, one.level, one.kinds, one.events) for one in found] == [
        (100, 399, "warn", ("clip_rate",), 300),
        (250, 250, "warn", ("spike", "robust_spike"), 2),
        (320, 320, "critical", ("nonfinite",), 1),
    ]
    assert [one.message for one in found] == [
        "clip_rate at 100",
        "spike at 250",
        "nonfinite at 320",
    ]


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 60), st.integers(0, 60)),
            *(st.sampled_from(["spike", "sustained", "clip_rate"]), st.sampled_from(LEVELS)),
        ),
        max_size=30,
    ),
    st.integers(0, 10),
    st.floats(0, 20),
)
def test_merged_with_a_small_gap_first_is_the_same(
    what: list[tuple[int, int, str, Level]], small: int, more: float
) -> None:
    events = [event(step, min(onset, step), kind, level) for step, onset, kind, level in what]
    gap = small + more
    assert merged(incidents(events, small), gap) == incidents(events, gap)
