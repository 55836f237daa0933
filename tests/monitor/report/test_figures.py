"""Figures: plotly accepts them, and they show what was logged."""

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fastclip.monitor import LayerRow, StepRecord
from fastclip.monitor.report import heatmaps
from fastclip.monitor.report.figures import BELOW, TOP, charts
from fastclip.monitor.report.run import Run
from tests.monitor.making import changed, healthy, incident_log, mixtral, times
from tests.monitor.report.logs import baseline, eventful, hostile, read, run_of

go = pytest.importorskip("plotly.graph_objects")


def drawn(*runs: Run) -> dict[str, Any]:
    return {chart.name: figure for chart, figure in charts(runs)}


@pytest.mark.parametrize(
    "runs",
    [[list(eventful())], [list(eventful()), baseline()], [hostile()], [mixtral()], [healthy(1)]],
    ids=["one", "two", "hostile", "mixtral", "single-record"],
)
def test_plotly_accepts_them(runs: list[list[StepRecord]]) -> None:
    read_runs = [read(records) for records in runs]
    figures = list(drawn(*read_runs).values())
    for run in read_runs:
        found = heatmaps.layers(run.grid)
        figures += [figure for figure in (found and (found.norms, found.nonfinite)) or () if figure]
    figures.append(heatmaps.calibration([("run", "var(--run1)", [(1.0, 0.5), (2.0, 0.1)])]))
    for figure in figures:
        go.Figure(figure)  # raises ValueError for a property that there is not
        json.dumps(figure, allow_nan=False)


def test_labels_are_as_plotly_reads_them() -> None:
    """It knows `&lt;` and `&amp;`, but would show `&quot;`."""
    rows = (LayerRow('<w> & "b"', 1.0, 1.0, 0.0),)
    run = read([StepRecord(step, 1.0, layers=rows) for step in range(2)], 'a "run"')
    found = heatmaps.layers(run.grid)
    assert found
    assert found.norms
    assert found.norms["layout"]["yaxis"]["ticktext"] == ['&lt;w&gt; &amp; "b"']
    assert drawn(run)["loss"]["data"][0]["name"] == 'a "run"'


def test_a_chart_for_what_was_logged_and_no_other() -> None:
    assert list(drawn(run_of(mixtral))) == ["loss"]
    assert list(drawn(read(healthy(50)))) == [
        *("loss", "grad_norm", "clip_rate", "loss_scale", "lr"),
        *("activation_max", "param_norm", "update_ratio"),
    ]
    assert drawn(read([StepRecord(0), StepRecord(1)])) == {}


def test_a_short_log_is_drawn_whole() -> None:
    records = mixtral()[:2000]
    (line,) = [t for t in drawn(read(records))["loss"]["data"] if t["mode"] == "lines"]
    assert line["x"] == [record.step for record in records]
    assert line["y"] == [pytest.approx(record.loss, rel=1e-5) for record in records]


def test_values_that_are_not_finite_stand_at_the_top() -> None:
    figure = drawn(run_of(incident_log))["loss"]
    (lost,) = [t for t in figure["data"] if t.get("marker", {}).get("symbol") == "x-thin-open"]
    assert (lost["x"], lost["y"], lost["yaxis"]) == ([500, 501, 777], [TOP] * 3, "y2")
    assert lost["text"][0] == "step 500<br>loss: nan"
    (events,) = [t for t in figure["data"] if t["y"] and t["y"][0] == BELOW]
    assert events["x"] == [500, 501, 777]
    assert events["marker"]["symbol"] == "diamond"


def test_what_was_rolled_back_is_dotted() -> None:
    figure = drawn(run_of(eventful))["grad_norm"]
    dotted, solid = (t for t in figure["data"] if t["mode"] == "lines")
    assert (dotted["line"]["dash"], solid["line"]["dash"]) == ("dot", "solid")
    given = {
        (step, attempt) for step, attempt in zip(dotted["x"], dotted["customdata"], strict=True)
    }
    assert {attempt for _, attempt in given} == {None, 0, 1}
    assert min(step for step, attempt in given if attempt == 0) >= 1400
    kept = list(zip(solid["x"], solid["customdata"], strict=True))
    assert kept == sorted(kept)
    assert {attempt for step, attempt in kept if step >= 1700} == {2}


def test_onsets_and_their_numbers() -> None:
    run = run_of(incident_log)
    figure = drawn(run)["loss"]
    assert sorted(shape["x0"] for shape in figure["layout"]["shapes"]) == sorted(
        episode.onset for episode in run.episodes
    )
    labels = {note["x"]: note["text"] for note in figure["layout"]["annotations"]}
    assert labels[700] == "4"  # the activations were first, three steps before the loss
    assert run.episodes[3].incident.first == 703


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_numbers_of_onsets_have_room(several: bool) -> None:
    """At 760 pixels the axis has 600, and a character 9."""
    run = read(changed(healthy(2500), (range(200, 2500, 15), "grad_norm", times(60))))
    assert len(run.episodes) == 154
    notes = drawn(*[run] * (1 + several))["grad_norm"]["layout"]["annotations"]
    for height in {note["y"] for note in notes}:
        row = [note for note in notes if note["y"] == height]
        assert len(row) > 10
        for one, two in pairwise(row):
            pixels = 600 / 2500 * (two["x"] - one["x"])
            assert pixels > 9 * (len(one["text"]) + len(two["text"])) / 2


def test_onsets_of_many_incidents_are_marked_at_the_top() -> None:
    few, many = (
        read(changed(healthy(2200), (range(200, stop, 20), "grad_norm", times(60))))
        for stop in (1100, 2100)
    )
    assert (len(few.episodes), len(many.episodes)) == (45, 95)
    for run, bottom in ((few, 0), (many, TOP)):
        shapes = drawn(run)["loss"]["layout"]["shapes"]
        assert [shape["y0"] for shape in shapes] == [bottom] * len(run.episodes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (times(1), "linear"),
        (times(1e3), "log"),
        (lambda loss: loss - 9e3, "linear"),
    ],
    ids=["ordinary", "spread", "negative"],
)
def test_loss_is_logarithmic_where_it_has_to_be(change: Any, expected: str) -> None:
    figure = drawn(read(changed(healthy(300), ([250], "loss", change))))["loss"]
    assert figure["layout"]["yaxis"]["type"] == expected


def test_norms_are_logarithmic_unless_one_is_zero() -> None:
    assert drawn(read(healthy(50)))["grad_norm"]["layout"]["yaxis"]["type"] == "log"
    zero = changed(healthy(50), ([20], "grad_norm", 0.0))
    assert drawn(read(zero))["grad_norm"]["layout"]["yaxis"]["type"] == "linear"


def test_loss_scales_are_powers_of_two() -> None:
    yaxis = drawn(run_of(incident_log))["loss_scale"]["layout"]["yaxis"]
    assert yaxis["tickvals"] == [2.0**15, 2.0**16]
    assert yaxis["ticktext"] == ["2<sup>15</sup>", "2<sup>16</sup>"]


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, sys.float_info.max, -sys.float_info.max])
def test_the_ends_of_what_floats_can_hold(value: float) -> None:
    metrics = ("loss", "grad_norm", "lr", "loss_scale", "activation_max", "update_ratio")
    records = changed(healthy(30), *(([20, 25], name, value) for name in metrics))
    for figure in drawn(read(records)).values():
        go.Figure(figure)
        json.dumps(figure, allow_nan=False)


def test_a_log_without_one_finite_value() -> None:
    records = [replace(record, loss=math.nan) for record in healthy(30)]
    figure = drawn(read(records))["loss"]
    assert {trace["yaxis"] for trace in figure["data"] if trace["mode"] == "markers"} == {"y2"}


def test_two_runs_share_the_axis_and_have_their_colours() -> None:
    long, short = read(healthy(500), "long"), read(healthy(100, seed=2), "short")
    figure = drawn(short, long)["grad_norm"]
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < 0
    assert 499 < high < 520
    lines = {t["name"]: t["line"]["color"] for t in figure["data"] if t["mode"] == "lines"}
    assert lines == {"short": "var(--run1)", "long": "var(--run2)"}
