"""`fastclip bench`: what is measured and shown, and wrong input in one line."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastclip.benchmarking import contest
from fastclip.benchmarking.contest import OURS, Contest, Row
from fastclip.benchmarking.machine import Idleness, describe
from fastclip.benchmarking.measure import Side, Spread, interleave
from fastclip.benchmarking.peers import PEERS, TORCH
from fastclip.benchmarking.report import WIDTH
from fastclip.benchmarking.runner import Result, Timing
from fastclip.cli import main
from fastclip.commands import InputError, bench, bench_plot, bench_table

IDLE = Idleness(0.0, 0.01, 20.0)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FULL", contest.QUICK)
    monkeypatch.setattr(bench, "WATCHED", 0.0)


def timing(side: str, *seconds: float) -> Timing:
    spread = Spread(*sorted(1e3 * one for one in (seconds[0], seconds[0], seconds[-1])))
    return Timing(side, spread, spread, 0.5 if side == OURS else None, "", seconds)


LAYOUT = bench_table.Layout(WIDTH, 20, list(TORCH), [], limit=True)
Times = dict[str, list[float]]


def result(title: str, rivals: Times, gaps: dict[str, str] | None = None) -> Result:
    """fastclip takes a second in each of three rounds."""
    timings = [timing(OURS, 1.0, 1.0, 1.0), *(timing(key, *of) for key, of in rivals.items())]
    row = Row(title, title, lambda size: Contest([], 0, 0))
    return Result(row, "torch", tuple(timings), gaps or {}, None, None, 3, 8, 1, None)


# What is chosen


def names(contains: str = "", quick: bool = False, every: bool = False) -> list[str]:
    return [row.name for row in bench._chosen(bench._found(contains, quick), contains, every)]


def test_quick_is_three_workloads_in_two_dtypes() -> None:
    assert names(quick=True) == [
        f"{workload}-{dtype}{suffix}"
        for workload in ("resnet50", "gpt2-small", "2000x1024")
        for dtype in ("float32", "bfloat16")
        for suffix in ("", "-clipped")
    ]


def test_what_takes_long_is_measured_only_by_its_name_or_with_all() -> None:
    big = {row.name for row in bench.ROWS if row.big}
    assert "gpt2-xl-float32" in big
    assert not big & set(names())
    assert names("gpt2-xl-bfloat16")[0] == "gpt2-xl-bfloat16"
    assert not big & set(names("gpt2-xl"))
    assert big & set(names("gpt2-xl-float32")) == {"gpt2-xl-float32"}
    assert big <= set(names(every=True))
    with pytest.raises(InputError, match=r"rows take long, add --all .*: gpt2-xl-mixed, "):
        names("gpt2-xl-mix")
    assert set(names("bert-large", quick=True)) == set(names("bert-large"))


def test_a_list_of_rows_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_measured", None)
    assert main(["bench", "--list", "--quick"]) == 0
    assert capsys.readouterr().out.split() == names(quick=True)


# What is shown


def test_losses_are_marked_counted_and_named() -> None:
    results = [
        result("a", {"torch": [2.0, 2.0, 2.0], "timm": [0.5, 0.5, 0.6]}),
        result("b", {"torch": [0.9, 1.0, 1.2], "timm": [3.0, 3.0, 3.0]}),
    ]
    text = bench_table.footing(results, IDLE, LAYOUT)
    assert (
        "fastclip is faster in 2 of 4 comparisons, slower (<) in 1; in 1 (~) the rounds disagree"
        in text
    )
    assert "slower: a: timm is 2.00 times as fast" in text
    assert text.count("slower: ") == 1
    disturbed = bench_table.footing(results, Idleness(0.0, 1.0, 20.0), LAYOUT)
    assert "slower: " not in disturbed
    assert "fastclip is faster in" not in disturbed


@pytest.mark.parametrize(
    ("times", "cell"),
    [([2.0, 2.0, 2.0], "2.00"), ([0.5, 0.5, 0.5], "0.50<"), ([0.9, 1.0, 1.2], "1.00~")],
    ids=["win", "loss", "neither"],
)
def test_a_cell_says_who_is_faster(times: list[float], cell: str) -> None:
    line = bench_table.line(result("a", {TORCH[0]: times}), LAYOUT)
    assert line.split()[:5] == ["a", "1000", "ms", "50%", cell]


def test_a_missing_peer_is_a_named_gap() -> None:
    timm = {"timm": "no module named timm"}
    results = [result("a", {}, {**timm, "optax": "too many"}), result("b", {}, timm)]
    text = bench_table.footing(results, IDLE, LAYOUT)
    assert "\nnot compared: timm (no module named timm)\n" in text
    assert "\nnot compared in 1 of 2 rows: optax (too many)\n" in text


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        (IDLE, "idle: other programs kept 0.01 cores busy"),
        (Idleness(0.0, None, 20.0), "whether other programs ran beside this cannot be told here"),
        (Idleness(0.0, 1.0, 20.0), "warning: the machine is not idle"),
    ],
    ids=["idle", "unknown", "busy"],
)
def test_the_last_line_is_on_idleness(idle: Idleness, words: str) -> None:
    text = bench_table.footing([result("a", {})], idle, LAYOUT)
    assert f"\n{words}" in text


@pytest.mark.parametrize(
    ("columns", "names", "hidden"),
    [
        (40, ["torch foreach", "torch for-loop", "timm"], ["of limit", "deepspeed", "optax"]),
        (99, [peer.name for peer in PEERS], ["of limit"]),
        (300, [peer.name for peer in PEERS], []),
    ],
    ids=["least", "without a column", "all"],
)
def test_the_table_fits_the_terminal_and_says_what_does_not(
    columns: int, names: list[str], hidden: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_table, "rivals", lambda: [peer.name for peer in PEERS])
    titles = [row.title for row in bench.ROWS]
    layout = bench_table.fit(titles, columns)
    assert (layout.names, layout.hidden) == (names, hidden)
    slow = {peer.name: [123.4, 123.4, 0.1] for peer in PEERS}
    slowest = result(max(titles, key=len), slow, {"deepspeed": "does not import: " + "words " * 40})
    text = "\n".join(
        [
            bench_table.heading(describe(), "cpu", "C++", layout),
            bench_table.line(slowest, layout),
            bench_table.footing([slowest], Idleness(0.0, 1.0, 9e9), layout),
        ]
    )
    assert max(map(len, text.splitlines()[4:])) <= max(80, min(100, columns))
    assert all(line == line.rstrip() for line in text.splitlines())
    assert ("deepspeed" in text.splitlines()[5]) == ("deepspeed" in names)
    assert all(name in text for name in hidden)
    assert f", commit {describe().commit}" in text


# End to end


@pytest.mark.usefixtures("_small")
def test_a_run_prints_a_table_and_writes_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    table, picture = tmp_path / "times.csv", tmp_path / "times.svg"
    command = ["bench", "--filter", "resnet50-bf", "--threads", "1", "--backend", "reference"]
    assert main([*command, "--csv", str(table), "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "backend reference: plain PyTorch" in out
    chosen = ["resnet50, bfloat16", "resnet50, bfloat16, clipped"]
    assert [line.split("  ")[0] for line in out.splitlines() if line[:8] == "resnet50"] == chosen
    assert err.endswith("[1/2] resnet50, bfloat16\n[2/2] resnet50, bfloat16, clipped\n")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["side"] for row in rows} >= {OURS, *TORCH}
    assert all(row["cpu"] and row["torch"] == torch.__version__ for row in rows)
    assert all(row["threads"] == "1" for row in rows)
    assert picture.read_text().count("<path") > 10


@pytest.mark.usefixtures("_small")
def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["bench", "--filter", "2000x1024-float16", "--threads", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in document["rows"]} == set(names("2000x1024-float16"))
    assert document["machine"]["threads"] == 1
    assert torch.get_num_threads() == threads


def test_the_picture_has_every_ratio_and_units(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    figure = bench_plot.draw(
        [result("a", {"torch": [2.0] * 3}), result("b", {"torch": [4.0] * 3, "timm": [0.5] * 3})],
        "a machine",
    )
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["torch", "timm"]
    shown = [list(container[0].get_xdata()) for container in axes.containers]
    assert shown == [[2.0, 4.0], [0.5]]
    assert "time over fastclip's (right of 1 fastclip is faster)" in axes.get_xlabel()
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert {"0.5x", "1x", "2x", "4x"} <= set(labels)
    assert len(labels) == len(set(labels)) < 8


def cut_short(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C while the row of that index is measured."""
    left = iter(range(after))

    def run(row: Row, size: contest.Size) -> Result:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replace(result(row.title, {TORCH[0]: [2.0] * 3}), row=row)

    monkeypatch.setattr("fastclip.benchmarking.runner.run", run)


@pytest.mark.usefixtures("_small")
def test_what_was_measured_before_ctrl_c_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_short(monkeypatch, after=1)
    table = tmp_path / "times.csv"
    assert main(["bench", "--filter", "resnet50-bf", "--csv", str(table)]) == 130
    out, err = capsys.readouterr()
    assert "columns: that one's time" in out
    assert "not measured, interrupted: resnet50-bfloat16-clipped\n" in err
    assert err.endswith("fastclip: interrupted\n")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {"resnet50-bfloat16"}
    # Not the targets, which are of the machine that they were set on.
    assert {(row["at_least"], row["met"]) for row in rows} == {("", "")}


@pytest.mark.usefixtures("_small")
def test_nothing_is_written_before_there_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(monkeypatch, after=0)
    assert main(["bench", "--quick", "--csv", str(tmp_path / "times.csv")]) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_small")
def test_a_quick_run_begins_no_row_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0.0)
    assert main(["bench", "--quick"]) == 0
    assert f"not measured, 0 s are over: {', '.join(names(quick=True))}" in capsys.readouterr().err


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "alexnet"], "dtypes: float32, bfloat16, float16, mixed; --list"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--csv", "no/such/folder/x.csv"], "the folder of --csv no/such/folder/x.csv"),
        (["--plot", "no/such/folder/x.png"], "the folder of --plot no/such/folder/x.png"),
        (["--plot", "x.gif"], "--plot x.gif must end in one of .png, .svg, .pdf"),
        (["--csv", "/"], "--csv / cannot be written: Is a directory"),
        (["--backend", "abacus"], "there is no backend 'abacus'"),
        (["--backend", "triton"], "triton"),
        pytest.param(
            ["--device", "cuda"], "torch finds no CUDA device here", marks=WITHOUT_GPU, id="no GPU"
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fastclip: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_missing_matplotlib_is_one_line_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == (
        "fastclip: --plot needs matplotlib, of the extra bench: "
        "pip install 'torch-fastclip[bench]'\n"
    )


# On a GPU


def test_a_call_is_timed_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def notes(word: str) -> Callable[[], None]:
        return lambda: log.append(f"{word} {torch.empty(0).device}")

    def build(size: contest.Size) -> Contest:
        notes("build")()
        return Contest([Side("torch", notes("call"), notes("before"))], 8, 1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    row = bench.on("meta", replace(bench.ROWS[0], build=build))
    interleave(row.build(contest.QUICK).sides, rounds=1)
    assert log == ["build meta", "before cpu", "wait", "call cpu", "wait"]
    assert (row.reads, row.writes) == (0, 0)
