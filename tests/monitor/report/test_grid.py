"""Layers by steps: order, merging, limits, and which rows are shown under which names."""

import math

import pytest

from fastclip.monitor import LayerRow
from fastclip.monitor.report import grid, heatmaps
from fastclip.monitor.report.grid import Grid


def rows(**norms: float) -> list[LayerRow]:
    return [LayerRow(name, norm, nonfinite=0.0) for name, norm in norms.items()]


def test_columns_are_in_order_of_attempt_and_step() -> None:
    made = Grid()
    for attempt, step in [(0, 100), (0, 300), (0, 290), (1, 200), (0, 250)]:
        made.add(step, attempt, rows(a=float(step)))
    places = [(0, 100), (0, 250), (0, 290), (0, 300), (1, 200)]
    assert [column.first for column in made.columns()] == places
    assert [column.norms[0] for column in made.columns()] == [100, 250, 290, 300, 200]


def test_one_step_told_twice_is_one_column() -> None:
    made = Grid()
    made.add(5, 0, rows(a=1.0))
    made.add(5, 0, rows(a=3.0, b=2.0))
    assert [list(column.norms) for column in made.columns()] == [[3.0, 2.0]]


def test_too_many_columns_are_merged_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "COLUMNS", 8)
    made = Grid()
    for step in range(100):
        made.add(step, 0, rows(a=1.0, **({"late": 50.0} if step == 77 else {})))
    columns = made.columns()
    assert 4 <= len(columns) <= 8
    assert (columns[0].first, columns[-1].last) == ((0, 0), (0, 99))
    late = [column for column in columns if len(column.norms) == 2 and column.norms[1] == 50.0]
    assert [column.first[1] <= 77 <= column.last[1] for column in late] == [True]


def test_norms_that_are_not_finite_or_missing() -> None:
    made = Grid()
    made.add(0, 0, [LayerRow("a", math.nan), LayerRow("b", -math.inf), LayerRow("c")])
    assert [str(value) for value in made.columns()[0].norms] == ["inf", "inf", "nan"]


def test_more_layers_than_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "LAYERS", 3)
    made = Grid()
    for step in range(2):
        made.add(step, 0, [LayerRow(f"layer{place}", 1.0) for place in range(5)])
    assert list(made.rows) == ["layer0", "layer1", "layer2"]
    found = heatmaps.layers(made)
    assert found
    assert (found.shown, found.known) == (3, 5)


def test_the_worst_layers_are_shown_in_the_order_of_the_model() -> None:
    made = Grid()
    for step in range(4):
        made.add(
            step,
            0,
            [
                LayerRow(
                    f"l{place}",
                    50.0 if (place, step) == (90, 3) else 1.0 + place / 1e3,
                    nonfinite=0,
                )
                for place in range(100)
            ]
            + [LayerRow("nan", math.nan, nonfinite=1e-3)],
        )
    found = heatmaps.layers(made)
    assert found
    assert found.norms
    assert found.nonfinite
    shown = found.norms["data"][0]["y"]
    assert len(shown) == found.shown == heatmaps.ROWS
    assert shown[-2:] == ["l90", "nan"]
    assert found.nonfinite["data"][0]["y"] == ["nan"]
    assert found.faulty == ("nan",)
    marks = found.norms["data"][1]
    assert list(zip(marks["x"], marks["y"], strict=True)) == [
        (str(step), "nan") for step in range(4)
    ]


def test_colours_are_logarithms_and_hover_has_the_norms() -> None:
    made = Grid()
    made.add(7, 0, rows(a=0.001, b=100.0, zero=0.0))
    found = heatmaps.layers(made)
    assert found
    assert found.norms
    heat = found.norms["data"][0]
    assert (heat["y"], heat["x"]) == (["a", "b", "zero"], ["7"])
    assert heat["z"] == [[-3.0], [2.0], [None]]
    assert heat["customdata"] == [[0.001], [100.0], [0.0]]
    assert found.nonfinite is None


def test_a_layer_next_to_nothing_does_not_take_the_colours() -> None:
    made = Grid()
    for step in range(20):
        made.add(step, 0, rows(bias=1e-9, a=0.01, b=1.0 + step, c=0.1))
    found = heatmaps.layers(made)
    assert found
    assert found.norms
    heat = found.norms["data"][0]
    # the median is 0.1 to 1: what is less than a thousandth of it has the colour of 0.01
    assert (heat["zmin"], heat["zmax"]) == (-2.0, pytest.approx(math.log10(20), abs=1e-3))
    assert heat["y"][0] == "bias"
    assert heat["z"][0] == [-9.0] * 20
    assert heat["customdata"][0] == [1e-9] * 20  # what the hover shows
    assert heatmaps.lowest(found.norms) == pytest.approx(0.01)
    made = Grid()
    made.add(0, 0, rows(a=0.01, b=1.0, c=9.0))
    found = heatmaps.layers(made)
    assert found
    assert found.norms
    assert found.norms["data"][0]["zmin"] == -2.0
    assert heatmaps.lowest(found.norms) is None


@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [
        ("lm_head.weight", 20, "lm_head.weight"),
        ("model.layers.10.self_attn.q_proj.weight", 40, "model.layers.10.self_attn.q_proj.weight"),
        ("model.layers.10.self_attn.q_proj.weight", 20, "m.l.10.sa.q_proj"),
        ("model.layers.10.norm.bias", 20, "m.l.10.norm.bias"),
        ("a" * 50, 8, "…aaaaaaa"),
        ("....", 3, "….."),
    ],
)
def test_short_names(name: str, length: int, expected: str) -> None:
    assert heatmaps.short(name, length) == expected


def test_names_that_are_cut_to_the_same_stay_apart() -> None:
    made = Grid()
    made.add(0, 0, [LayerRow("x" * 200 + mark + "y" * 200, 1.0) for mark in "ab"])
    found = heatmaps.layers(made)
    assert found
    assert found.norms
    assert len(set(found.norms["data"][0]["y"])) == 2


def test_a_layer_is_faulty_by_its_count_or_else_by_its_norm() -> None:
    grid = Grid()
    rows = (
        *(LayerRow("sound", 1.0, 1.0, 0.0), LayerRow("counted", 1.0, 1.0, 0.5)),
        *(LayerRow("overflow", math.inf, 1e30, 0.0), LayerRow("norm-alone", math.nan)),
    )
    grid.add(0, 0, rows)
    grid.add(1, 0, [LayerRow("counted", 1.0, 1.0, 0.0), LayerRow("late", math.inf)])
    assert grid.faulty() == ["counted", "norm-alone", "late"]
