"""The Monitor: live and replayed agree, it resumes anywhere, goes back, and keeps states apart."""

import ast
import math
import pickle
import textwrap
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip import monitor as package
from fastclip.monitor import (
    JSONL,
    Drift,
    Event,
    Monitor,
    RobustSpike,
    Spike,
    StepRecord,
    Sustained,
    default_detectors,
)
from fastclip.monitor.monitor import KEPT
from tests.monitor.making import healthy, incident_log, of_loss, verdicts
from tests.monitor.test_observe import Kept


def fields(record: StepRecord) -> dict[str, Any]:
    """What a training loop would pass: it knows of no attempts."""
    return {name: value for name, value in vars(record).items() if name != "attempt"}


def live(monitor: Monitor, records: list[StepRecord]) -> list[Event]:
    return [event for record in records for event in monitor.observe(**fields(record))]


def test_live_and_replayed_agree(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    running, replaying = Monitor(sinks=[JSONL(path)]), Monitor()
    events = live(running, incident_log())
    assert len(events) > 100
    assert repr(replaying.replay(path)) == repr(events)
    assert replaying.state_dict() == running.state_dict()
    assert repr(list(JSONL(path))) == repr(incident_log())


def test_events_come_in_the_order_of_the_detectors() -> None:
    records = of_loss([1.0 + 0.01 * (i % 5) for i in range(150)] + [9.0])
    detectors = default_detectors()
    kinds = [event.kind for event in Monitor(detectors).replay(records)]
    assert kinds == ["spike", "robust_spike"]
    assert [event.kind for event in Monitor(detectors[::-1]).replay(records)] == kinds[::-1]
    assert Monitor([]).replay(records) == []


def test_the_default_set() -> None:
    assert Monitor().detectors == tuple(default_detectors())
    assert repr(default_detectors()) == (
        "[Spike(metric='loss', ratio=1.5, window=100), "
        "RobustSpike(metric='loss', k=7.0, window=100, log=False), "
        "RobustSpike(metric='grad_norm', k=7.0, window=100, log=True), "
        "Sustained(metric='loss', window=5, sustained=1.15, critical=1.5), "
        "Drift(metric='loss', window=50, ratio=1.1), NonFinite(), "
        "LossScaleDrop(drops=3, window=100), ClipRate(over=0.5, window=100)]"
    )


def test_resumes_at_every_cut_point() -> None:
    """After each record of 2,000: a new monitor, from the pickled state, says the same of the next
    record and is then in the same state. So it says the same of all that follow.
    """
    records, uncut = incident_log(), Monitor()
    for record in records:
        resumed = Monitor()
        resumed.load_state_dict(pickle.loads(pickle.dumps(uncut.state_dict())))
        events = uncut.observe(**fields(record))
        assert repr(resumed.observe(**fields(record))) == repr(events)
        assert resumed.state_dict() == uncut.state_dict()


@pytest.mark.parametrize("cut", [1, 151, 502, 1105, 1999])
def test_resumes_to_the_end(cut: int) -> None:
    records = incident_log()
    first, second = Monitor(), Monitor()
    events = live(first, records[:cut])
    second.load_state_dict(first.state_dict())
    events += live(second, records[cut:])
    assert repr(events) == repr(Monitor().replay(records))


def test_the_state_is_plain_small_and_loads_with_weights_only(tmp_path: Path) -> None:
    monitor, sizes = Monitor(), []
    for record in healthy(1500):
        monitor.observe(**fields(record))
        sizes.append(len(pickle.dumps(monitor.state_dict())))
    assert max(sizes[1000:]) < 1.03 * max(sizes[:1000])
    assert max(sizes) < 20_000
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == monitor.state_dict()
    assert ast.literal_eval(repr(monitor.state_dict())) == monitor.state_dict()


def test_each_detector_gets_its_own_state_back() -> None:
    records = incident_log(700)
    saved = Monitor([Spike(), Spike(window=50), RobustSpike("grad_norm"), Drift()])
    saved.replay(records)
    state = saved.state_dict()
    assert list(state["detectors"]) == [
        *("spike/loss/0", "spike/loss/1", "robust_spike/grad_norm/0", "drift/loss/0")
    ]
    loaded = Monitor([Drift(), Sustained(), Spike(), Spike(window=50), Spike("lr")])
    loaded.load_state_dict(state)
    expected = {name: state["detectors"][name] for name in ("drift/loss/0", "spike/loss/0")}
    empty = {"sustained/loss/0": Sustained().init(), "spike/lr/0": Spike().init()}
    expected |= {"spike/loss/1": state["detectors"]["spike/loss/1"], **empty}
    assert loaded.state_dict()["detectors"] == expected


def test_a_changed_window_takes_up_what_fits() -> None:
    records = incident_log(150)
    saved = Monitor([Spike(window=100), RobustSpike("loss", window=100)])
    saved.replay(records)
    loaded = Monitor([Spike(window=20), RobustSpike("loss", window=20)])
    loaded.load_state_dict(saved.state_dict())
    spike = StepRecord(150, 50.0)
    expected = [event for d in loaded.detectors for event in verdicts(d, [*records, spike])][-2:]
    found = loaded.observe(step=150, loss=50.0)
    assert [event.baseline for event in found] == [event.baseline for event in expected]
    assert len(found) == 2


def rolled_back() -> tuple[list[StepRecord], int]:
    """1,000 steps, of which those from 600 on go wrong; then again from 550; and what is there at
    first.
    """
    records = healthy(1000)
    bad = [replace(record, loss=9.0, grad_norm=80.0) for record in records[600:]]
    return [*records[:600], *bad, *records[550:]], 550


def test_a_rollback_takes_the_states_back(tmp_path: Path) -> None:
    records, target = rolled_back()
    path, sink = tmp_path / "run.jsonl", Kept()
    running = Monitor(sinks=[JSONL(path), sink])
    events = live(running, records)
    assert any(event.level == "critical" for event in events)
    assert {event.step for event in events} <= set(range(600, 1000))
    assert sum(event.step == 600 for event in events) == 3  # not once more in the new attempt
    attempts = [(record.attempt, record.step) for record in sink.records]
    assert attempts == [*((0, i) for i in range(1000)), *((1, i) for i in range(target, 1000))]
    untroubled = Monitor()
    untroubled.replay(healthy(1000))
    state = running.state_dict()
    assert (state.pop("attempt"), running.attempt) == (1, 1)
    assert state.items() <= untroubled.state_dict().items()
    for log in (path, sink.records, records):
        again = Monitor()
        assert again.replay(log) == events
        assert again.state_dict() == running.state_dict()


@pytest.mark.parametrize("process", ["same", "new"])
def test_a_rollback_with_the_state_of_the_checkpoint(tmp_path: Path, process: str) -> None:
    records, target = rolled_back()
    path = tmp_path / "run.jsonl"
    running = Monitor(sinks=[JSONL(path)])
    events = live(running, records[:target])
    checkpoint = pickle.loads(pickle.dumps(running.state_dict()))
    events += live(running, records[target:1000])
    if process == "new":
        running = Monitor(sinks=[JSONL(path)])
    running.load_state_dict(checkpoint)
    assert running.attempt == 0
    events += live(running, records[1000:])
    assert running.attempt == 1
    again = Monitor()
    assert again.replay(path) == events
    assert again.state_dict() == running.state_dict()


def test_attempts() -> None:
    sink = Kept()
    monitor = Monitor([], [sink])
    for step in (0, 1, 1, 5, 3, 4):
        monitor.observe(step=step)
    assert [record.attempt for record in sink.records] == [0, 0, 1, 1, 2, 2]
    monitor.observe(step=5, attempt=9)
    monitor.observe(step=6)
    monitor.observe(step=6)
    assert [record.attempt for record in sink.records[-3:]] == [9, 9, 10]
    state = monitor.state_dict()
    monitor.observe(step=0)
    monitor.load_state_dict(state)
    assert monitor.attempt == 11  # a state never lowers it
    other = Monitor()
    other.load_state_dict(state)
    assert other.attempt == 10
    other.observe(step=6)
    assert other.attempt == 11


def test_attempts_go_on_where_the_log_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for steps in ([0, 1, 2], [3], [2, 3], [0]):
        monitor = Monitor([], [JSONL(path)])
        for step in steps:
            monitor.observe(step=step)
    pairs = [(record.attempt, record.step) for record in JSONL(path)]
    assert pairs == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0)]
    with path.open("ab") as file:
        file.write(b'{"step": 99, "att')
    assert Monitor([], [JSONL(path)]).attempt == 2


def states_after(records: list[StepRecord]) -> Any:
    monitor = Monitor()
    monitor.replay(records)
    return monitor.state_dict()["detectors"]


def test_a_log_may_be_replayed_into_the_monitor_that_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    records = healthy(300)
    before = Monitor(sinks=[JSONL(path)])
    live(before, [*records[:200], *records[150:200]])
    after = Monitor(sinks=[JSONL(path)])
    after.replay(path)
    assert (after.attempt, after.state_dict()) == (1, before.state_dict())
    live(after, records[200:])
    assert {record.attempt for record in list(JSONL(path))[200:]} == {1}


def test_going_back_two_thousand_records_and_further() -> None:
    records = healthy(KEPT + 500)
    near, far = Monitor(), Monitor()
    near.replay([*records, records[500]])
    far.replay([*records, records[400]])
    assert near.state_dict()["detectors"] == states_after(records[:501])
    assert far.state_dict()["detectors"] == states_after([records[400]])  # unknown, so empty


@pytest.mark.parametrize("loading", [False, True])
def test_abandoned_states_do_not_count_among_the_two_thousand(loading: bool) -> None:
    records = healthy(2400)
    saved, monitor = Monitor(), Monitor()
    saved.replay(records[:900])
    monitor.replay(records)
    if loading:
        monitor.load_state_dict(saved.state_dict())
    monitor.replay([*records[900:1900], records[850]])
    assert monitor.state_dict()["detectors"] == states_after(records[:851])


def test_going_back_before_the_first_record() -> None:
    records = healthy(300)
    monitor = Monitor()
    monitor.replay([*records[200:], records[100]])
    assert monitor.state_dict()["detectors"] == states_after([records[100]])


def test_a_loaded_state_is_where_a_new_process_starts() -> None:
    """Whatever its next step: here the one that the state has seen already."""
    records = healthy(101)
    saved, loaded = Monitor(), Monitor()
    saved.replay(records)
    loaded.load_state_dict(saved.state_dict())
    loaded.observe(**fields(records[100]))
    assert loaded.attempt == 1
    twice = [*records, replace(records[100], step=101)]
    assert loaded.state_dict()["detectors"] == states_after(twice)


def test_loading_the_state_of_the_start_starts_again() -> None:
    start = Monitor().state_dict()
    monitor = Monitor()
    monitor.replay(healthy(200))
    monitor.load_state_dict(start)
    monitor.replay(healthy(50))
    assert monitor.attempt == 1
    assert monitor.state_dict()["detectors"] == states_after(healthy(50))


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a state of a Monitor has 'attempt', got \\['bands'"):
        Monitor().load_state_dict({"bands": (), "detectors": {}, "step": 1})


class Failing:
    def init(self) -> int:
        return 0

    def __call__(self, state: int, record: StepRecord) -> tuple[int, list[Event]]:
        if record.step == 5:
            raise ZeroDivisionError("a bug")
        return state + 1, []


def test_a_detector_that_fails_changes_nothing() -> None:
    sink = Kept()
    monitor = Monitor([Spike(), Failing()], [sink])
    monitor.replay(of_loss([1.0] * 5))
    state = monitor.state_dict()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        monitor.observe(step=5, loss=1.0)
    assert (monitor.state_dict(), sink.records) == (state, [])


def test_monitors_may_share_detectors() -> None:
    detectors = default_detectors()
    first, second = Monitor(detectors), Monitor(detectors)
    one, other = incident_log(), healthy(2000, 5)
    found: tuple[list[Event], list[Event]] = ([], [])
    for left, right in zip(one, other, strict=True):
        found[0].extend(first.observe(**fields(left)))
        found[1].extend(second.observe(**fields(right)))
    assert repr(found[0]) == repr(Monitor().replay(one))
    assert found[1] == []


def test_the_documented_detector() -> None:
    """The example in the package's docstring, as a user would write it."""
    assert package.__doc__ is not None
    code = textwrap.dedent(package.__doc__.split("::\n\n")[2])
    names: dict[str, Any] = {"math": math, **{n: getattr(package, n) for n in package.__all__}}
    exec(code, names)
    monitor: Monitor = names["monitor"]
    events = monitor.replay(of_loss([3.0, 2.0] + [2.5, math.nan] * 1100))
    mine = [event for event in events if event.kind == "plateau"]
    assert [event.step for event in mine] == [1001, 2001]
    assert (mine[0].onset, mine[0].onset_metric) == (3, "loss")  # the first NaN
    assert mine[0].message == "no loss below 2 for 1000 records"
    assert monitor.state_dict()["detectors"]["plateau/loss/0"] == (2.0, 2200)
    assert len(code.splitlines()) < 20


def test_an_onset_that_a_detector_gives_is_kept() -> None:
    class Knowing(Failing):
        def __call__(self, state: int, record: StepRecord) -> tuple[int, list[Event]]:
            return state, [Event(record.step, "mine", "info", "loss", 1.0, None, 2, "lr")]

    [event] = Monitor([Knowing()]).observe(step=7)
    assert (event.onset, event.onset_metric) == (2, "lr")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"detectors": [Spike]}, "a detector has init.. and can be called, got <class"),
        ({"detectors": ["loss"]}, "a detector has .* got 'loss'"),
        ({"sinks": [Kept]}, r"a sink has write\(record, events\), got <class"),
        ({"sinks": ["run.jsonl"]}, "a sink has .* got 'run.jsonl'"),
        ({"detectors": Spike()}, r"detectors must be a list of them, got Spike\("),
        (
            {"sinks": JSONL("run.jsonl")},
            r"list of them, got <.*JSONL.*; pass it as sinks=\[\.\.\.\]",
        ),
        ({"detectors": JSONL("no.jsonl")}, r"detectors must be .* got <.*; pass it as sinks=\["),
        ({"detectors": [JSONL("no.jsonl")]}, r"a detector has .* got <.*; pass it as sinks=\["),
    ],
)
def test_what_is_no_detector_or_sink(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Monitor(**arguments)


def test_sinks_get_every_record_with_its_events() -> None:
    sink = Kept()
    monitor = Monitor([Spike(window=2)], [sink])
    returned = [monitor.observe(step=i, loss=loss) for i, loss in enumerate([1.0, 1.0, 5.0, 1.0])]
    assert sink.events == returned
    assert [len(events) for events in returned] == [0, 0, 1, 0]
    monitor.replay(of_loss([1.0]))
    assert len(sink.records) == 4  # a replay writes nothing


def test_memory_is_constant() -> None:
    """After 2,000 records, whose states are kept, nothing more is."""
    records = healthy(KEPT + 100)
    monitor = Monitor()
    tracemalloc.start()
    monitor.replay(records)
    before, _ = tracemalloc.get_traced_memory()
    monitor.replay(replace(record, step=record.step + 3000) for record in records[:1000])
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert before < 10e6
    assert after < 1.05 * before
    assert peak < 1.1 * before
