"""Rows of layers: which records carry them, what they are made of, and amending a log."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fastclip
from fastclip.commands import replay
from fastclip.monitor import JSONL, Event, LayerRow, LayerTable, Monitor, StepRecord, Telemetry
from fastclip.monitor.layers import merged
from tests.making import floats, parameters
from tests.monitor.test_observe import Kept


class Amended(Kept):
    """Also keeps what is amended."""

    def __init__(self) -> None:
        super().__init__()
        self.amended: list[StepRecord] = []

    def amend(self, record: StepRecord) -> None:
        self.amended.append(record)


class Watching:
    """Gives what it was made with, one after the other."""

    def __init__(self, *taken: Mapping[str, Any]) -> None:
        self.taken = list(taken)

    def take(self) -> Mapping[str, Any]:
        return self.taken.pop(0) if self.taken else {}


class At:
    """An event at some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def init(self) -> tuple[()]:
        return ()

    def __call__(self, state: tuple[()], record: StepRecord) -> tuple[tuple[()], list[Event]]:
        found = record.step in self.steps
        return state, [Event(record.step, "at", "info", "loss", 1.0)] if found else []


def stats_of(norm: float) -> fastclip.GradStats:
    names, grads = ("w", "b"), (floats(3.0 * norm, 4.0 * norm), floats(math.nan, 1.0))
    return fastclip.grad_stats(list(zip(names, parameters(*grads), strict=True)))


def rows_of(norm: float) -> tuple[LayerRow, ...]:
    return (LayerRow("w", 5.0 * norm, 4.0 * norm, 0.0), LayerRow("b", math.nan, 1.0, 0.5))


def carrying(records: list[StepRecord]) -> list[int]:
    return [record.step for record in records if record.layers is not None]


def run(
    steps: int, *events: int, lag: int = 0, every: int = 100, before: int = 10, sink: Any = None
) -> Amended:
    sink = Amended() if sink is None else sink
    telemetry = Telemetry(lag, layers_every=every, layers_before=before)
    with Monitor([At(*events)], [sink], telemetry=telemetry) as monitor:
        for step in range(steps):
            monitor.observe(step=step, stats=stats_of(1.0 + step))
    assert isinstance(sink, Amended)
    return sink


@pytest.mark.parametrize("lag", [0, 2])
def test_every_so_many_records(lag: int) -> None:
    sink = run(12, lag=lag, every=4)
    assert carrying(sink.records) == [3, 7, 11]
    assert [repr(sink.records[step].layers) for step in (3, 7)] == [
        repr(rows_of(4.0)),
        repr(rows_of(8.0)),
    ]
    assert sink.amended == []


@pytest.mark.parametrize("lag", [0, 2])
def test_an_event_and_the_records_before_it(lag: int) -> None:
    sink = run(30, 15, lag=lag, every=12, before=5)
    assert carrying(sink.records) == [11, 15, 23]
    # 11 had rows already
    assert [record.step for record in sink.amended] == [10, 12, 13, 14]
    for record in sink.amended:
        plain = sink.records[record.step]
        assert repr(record.layers) == repr(rows_of(1.0 + record.step))
        assert (record.attempt, plain.layers) == (plain.attempt, None)
        assert repr(record.grad_norm) == repr(plain.grad_norm)


def test_at_most_one_burst_in_so_many_records() -> None:
    sink = run(40, *range(5, 40), every=20, before=3)
    assert carrying(sink.records) == [5, 19, 25, 39]
    assert [record.step for record in sink.amended] == [2, 3, 4, 22, 23, 24]


class Kinds:
    """Events of these kinds and metrics at these steps."""

    def __init__(self, **steps: range) -> None:
        self.steps = steps

    def init(self) -> tuple[()]:
        return ()

    def __call__(self, state: tuple[()], record: StepRecord) -> tuple[tuple[()], list[Event]]:
        found = [name.split("_of_") for name, steps in self.steps.items() if record.step in steps]
        return state, [Event(record.step, kind, "warn", metric, 1.0) for kind, metric in found]


@pytest.mark.parametrize(
    ("steps", "carried", "amended"),
    [
        # The flood has rows at 5, and shares those of 14: its next are 20 after them, and so on.
        (
            {"rate_of_clipped": range(5, 60), "nan_of_loss": range(14, 16)},
            *([5, 14, 19, 34, 39, 54, 59], [4, 13, 33, 53]),
        ),
        ({"nan_of_loss": range(5, 6), "nan_of_lr": range(8, 9)}, [5, 8, 19, 39, 59], [4, 7]),
    ],
    ids=["another-kind", "another-metric"],
)
def test_another_kind_of_event_has_its_rows(
    steps: dict[str, range], carried: list[int], amended: list[int]
) -> None:
    sink, telemetry = Amended(), Telemetry(layers_every=20, layers_before=1)
    with Monitor([Kinds(**steps)], [sink], telemetry=telemetry) as monitor:
        for step in range(60):
            monitor.observe(step=step, stats=stats_of(1.0 + step))
    assert carrying(sink.records) == carried
    assert [record.step for record in sink.amended] == amended


def test_no_record_is_amended_twice() -> None:
    sink = run(20, 4, 8, every=4, before=10)
    assert carrying(sink.records) == [3, 4, 7, 8, 11, 15, 19]
    assert [record.step for record in sink.amended] == [0, 1, 2, 5, 6]


@pytest.mark.parametrize("every", [0, 4])
def test_none_but_given_ones(every: int) -> None:
    sink = Amended()
    watch = Watching({"layers": LayerTable(("w",), {"norm": [9.0]})})
    telemetry = Telemetry(layers_every=every)
    monitor = Monitor([At(2)], [sink], telemetry=telemetry, watches=[watch])
    given = [LayerRow("own", 1.0)]
    table = LayerTable(("w", "b"), {"norm": torch.tensor([1.0, 2.0]), "param_norm": [3.0, None]})
    monitor.observe(step=0, stats=stats_of(1.0), layers=given)
    monitor.observe(step=1, stats=stats_of(1.0), layers=table)
    monitor.observe(step=2, stats=stats_of(1.0))
    assert sink.records[0].layers == tuple(given)
    assert sink.records[1].layers == (LayerRow("w", 1.0, None, None, 3.0), LayerRow("b", 2.0))
    assert carrying(sink.records) == ([0, 1] if every == 0 else [0, 1, 2])
    assert sink.amended == []


@pytest.mark.parametrize("lag", [None, 2])
def test_watches_are_taken_along(lag: int | None) -> None:
    """In order, after the statistics and before keywords; their rows are merged by name."""
    first = Watching(
        {"param_norm": torch.tensor(7.0), "lr": 0.5, "grad_norm": 1.0, "update_ratio": None},
        {},
        {"activation_max": 4.0},
    )
    columns: dict[str, Any] = {"param_norm": torch.tensor([1.0, 2.0]), "update_ratio": [0.25, 0.5]}
    second = Watching({"param_norm": 8.0, "layers": LayerTable(("b", "x"), columns)})
    third = Watching({"layers": LayerTable(("x",), {"norm": torch.tensor([3.0])})})
    sink = Kept()
    with Monitor([], [sink], telemetry=Telemetry(lag), watches=[first, second, third]) as monitor:
        monitor.observe(step=0, stats=stats_of(1.0), lr=0.25, param_norm=None)
        monitor.observe(step=1)
        monitor.observe(step=2)
    record = sink.records[0]
    assert (record.param_norm, record.lr, record.grad_norm) == (8.0, 0.25, 1.0)
    assert (record.clip_coef, record.update_ratio) == (1.0, None)
    assert repr(record.layers) == repr(
        (
            LayerRow("w", 5.0, 4.0, 0.0),
            LayerRow("b", math.nan, 1.0, 0.5, 1.0, 0.25),
            LayerRow("x", 3.0, None, None, 2.0, 0.5),
        )
    )
    assert sink.records[1:] == [StepRecord(1), StepRecord(2, activation_max=4.0)]


BAD_WATCHES: list[tuple[type[Exception], str, Any]] = [
    (TypeError, r"Watching.take\(\) gave 'param', which a record has not", {"param": 1.0}),
    (TypeError, r"the layers of Watching.take\(\) must be a LayerTable", {"layers": []}),
    (
        TypeError,
        "a layer has no 'norms'; its columns are norm, max_abs",
        {"layers": LayerTable(("w",), {"norms": [1.0]})},
    ),
    (
        ValueError,
        r"the column 'norm' of 2 layers has the shape \(1,\)",
        {"layers": LayerTable(("w", "b"), {"norm": [1.0]})},
    ),
    (
        ValueError,
        r"the column 'norm' of 1 layers has the shape \(1, 1\)",
        {"layers": LayerTable(("w",), {"norm": torch.ones(1, 1)})},
    ),
    (
        TypeError,
        "the column 'norm' of layers is on the device meta",
        {"layers": LayerTable(("w",), {"norm": torch.ones(1, device="meta")})},
    ),
    (
        TypeError,
        "the column 'norm' of layers must be numbers: could not convert",
        {"layers": LayerTable(("w",), {"norm": "x"})},  # type: ignore[dict-item]
    ),
    (TypeError, r"Watching.take\(\) must give a mapping of fields, gave None", None),
]


@pytest.mark.parametrize(
    ("error", "text", "taken"), BAD_WATCHES, ids=[text[-25:] for _, text, _ in BAD_WATCHES]
)
def test_what_a_watch_must_not_give(error: type[Exception], text: str, taken: Any) -> None:
    sink = Kept()
    monitor = Monitor([], [sink], watches=[Watching(taken)])
    with pytest.raises(error, match=text):
        monitor.observe(step=0)
    monitor.observe(step=0)
    assert [record.attempt for record in sink.records] == [0]  # the first was not seen


def test_a_refused_call_takes_nothing_from_a_watch() -> None:
    sink = Kept()
    monitor = Monitor([], [sink], watches=[Watching({"param_norm": 2.0})])
    with pytest.raises(TypeError, match="a record has no 'los'"):
        monitor.observe(step=0, los=1.0)  # type: ignore[call-arg]
    monitor.observe(step=0)
    assert sink.records[0].param_norm == 2.0


def test_what_is_no_watch() -> None:
    with pytest.raises(TypeError, match=r"a watch has take\(\), got <class"):
        Monitor(watches=[Watching])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"watches must be a list of them, got <.*Watching"):
        Monitor(watches=Watching())  # type: ignore[arg-type]


def test_merging_tables() -> None:
    first = LayerTable(("a", "b"), {"norm": [1.0, 2.0]})
    assert merged([first]) == (LayerRow("a", 1.0), LayerRow("b", 2.0))
    second = LayerTable(("c", "a"), {"norm": [3.0, 4.0], "max_abs": [5.0, 6.0]})
    both = (LayerRow("a", 4.0, 6.0), LayerRow("b", 2.0), LayerRow("c", 3.0, 5.0))
    assert merged([first, second]) == both


def test_rows_of_statistics_are_those_of_its_layers() -> None:
    """In other orders and dtypes, and without a gradient."""
    for p, dtype in ((math.inf, torch.float32), (1.0, torch.float64), (3.0, torch.bfloat16)):
        grads = [floats(0.1, -0.7, dtype=dtype), floats(dtype=dtype), floats(math.inf, dtype=dtype)]
        sink, stats = Kept(), fastclip.grad_stats(parameters(*grads), p)
        Monitor([], [sink], telemetry=Telemetry(layers_every=1)).observe(step=0, stats=stats)
        assert repr(sink.records[0].layers) == repr(observed_layers(stats))
    sink = Kept()
    Monitor([], [sink], telemetry=Telemetry(layers_every=1)).observe(
        step=0, stats=fastclip.grad_stats([])
    )
    assert (sink.records[0].layers, sink.records[0].nonfinite_count) == ((), 0)


def observed_layers(stats: fastclip.GradStats) -> Any:
    sink = Kept()
    Monitor([], [sink]).observe(step=0, layers=stats.layers())
    return sink.records[0].layers


# The log


def test_a_log_is_amended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"

    class Logged(Amended):
        log = JSONL(path)

        def write(self, record: StepRecord, events: list[Event]) -> None:
            super().write(record, events)
            self.log.write(record, events)

        def amend(self, record: StepRecord) -> None:
            super().amend(record)
            self.log.amend(record)

    sink = run(10, 6, every=5, before=4, sink=Logged())
    log = JSONL(path)
    assert repr(list(log)) == repr(sink.records)  # and no warning
    read = list(log.amendments())
    assert [(record.step, record.attempt) for record in read] == [(2, 0), (3, 0), (5, 0)]
    assert repr([record.layers for record in read]) == repr([r.layers for r in sink.amended])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [list(line) for line in lines if "step" not in line] == [
        ["amends", "attempt", "layers"]
    ] * 3
    last = log.last()
    assert last is not None
    assert last.step == 9
    assert replay.run(str(path), json=True) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert {"records": 10, "skipped_lines": 0}.items() <= json.loads(printed.out).items()


def test_a_torn_amendment_is_told_and_nothing_else_is_lost(tmp_path: Path) -> None:
    log = JSONL(tmp_path / "run.jsonl")
    log.write(StepRecord(0), [])
    log.amend(StepRecord(0, layers=(LayerRow("w", math.inf),)))
    whole = log.path.read_bytes()
    log.close()
    log.path.write_bytes(whole + whole.splitlines(keepends=True)[1][:-9])
    again = JSONL(log.path)
    again.write(StepRecord(1), [])
    with pytest.warns(UserWarning, match="line 3: skipped, for it is not a record"):
        assert [record.step for record in again] == [0, 1]
    with pytest.warns(UserWarning, match="line 3: skipped, for it is not a record"):
        [amendment] = again.amendments()
    assert amendment == StepRecord(0, layers=(LayerRow("w", math.inf),))


def test_a_closed_log_opens_again(tmp_path: Path) -> None:
    log = JSONL(tmp_path / "run.jsonl")
    log.close()
    log.write(StepRecord(0), [])
    log.close()
    log.close()
    log.write(StepRecord(1), [])
    assert [record.step for record in log] == [0, 1]


class OfLayers:
    """Judges rows of layers: an event where the record has some, and the number of those so far;
    and one at step 6 whatever it has."""

    def init(self) -> int:
        return 0

    def __call__(self, state: int, record: StepRecord) -> tuple[int, list[Event]]:
        seen = state + (record.layers is not None)
        return seen, [Event(6, "six", "info", "loss", seen)] if record.step == 6 else []


@pytest.mark.parametrize("lag", [0, 2])
def test_a_replay_agrees_where_a_detector_looks_at_layers(tmp_path: Path, lag: int) -> None:
    path, events = tmp_path / "run.jsonl", []
    telemetry = Telemetry(lag, layers_every=5)
    monitor = Monitor([OfLayers()], [JSONL(path)], telemetry=telemetry)
    with monitor:
        for step in range(12):
            events += monitor.observe(step=step, stats=stats_of(1.0))
    events += monitor.flush()
    again = Monitor([OfLayers()])
    assert again.replay(path) == events
    assert [event.value for event in events] == [2]  # of steps 4 and 6
    assert again.state_dict() == monitor.state_dict()
