"""The benchmark's own logic: what it measures is what it says, and small runs work end to end."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, recording, rules
from benchmarks.rows import ROWS
from fastclip.benchmarking import functions, memory, peers
from fastclip.benchmarking.contest import OURS, QUICK, Row
from fastclip.benchmarking.measure import (
    Side,
    Spread,
    interleave,
    paired_ratios,
    rounds_for,
    spread,
)
from fastclip.benchmarking.memory import MemoryResult
from fastclip.benchmarking.peers import TORCH
from fastclip.benchmarking.report import HEADER, WIDTH, footing, line, peer_lines, records
from fastclip.benchmarking.runner import Rates, Result, Timing, least_seconds, run
from fastclip.benchmarking.workloads import DTYPES, WORKLOADS, Clip

race_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def timing(side: str, ratio: float, ms: float) -> Timing:
    about = Spread(ratio * 0.9, ratio, ratio * 1.1)
    seconds = tuple(1 / part for part in about for _ in range(2))
    return Timing(side, Spread(ms, ms, ms), about, 0.5, "", seconds)


def result(ratio: float, at_least: float | None) -> Result:
    row = replace(ROWS[0], title="gpt2-medium, bfloat16, clipped, warm", at_least=at_least)
    return Result(
        row=row,
        baseline="torch foreach",
        timings=(timing(OURS, ratio, 12345.6), timing("torch foreach", 1.0, 99.999)),
        gaps={"timm": "no module named timm"},
        limit=1234.5,
        floor_ms=50.0,
        rounds=2,
        n_bytes=8,
        n_tensors=2,
        rates=Rates(30e9, 25e9, 20e9, 15e9),
    )


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional peers have tests of their own: XLA compiles for each list."""
    monkeypatch.setattr(peers, "PEERS", [peer for peer in peers.PEERS if peer.name in TORCH])


# measure


def test_rounds_alternate_and_untimed_parts_surround_each_call() -> None:
    log: list[str] = []

    def side(name: str) -> Side:
        def run_it() -> str:
            log.append(name)
            return name

        before = partial(log.append, f"before {name}")
        return Side(name, run_it, before, lambda got: log.append(f"check {got}"))

    seconds = interleave([side("a"), side("b")], rounds=3)
    order = [entry for entry in log if len(entry) == 1]
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert log[:3] == ["before a", "a", "check a"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_preparation_and_checks_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fastclip.benchmarking.measure.time.perf_counter", lambda: clock[0])

    def takes(seconds: float) -> None:
        clock[0] += seconds

    side = Side("a", lambda: takes(1), lambda: takes(10), lambda _: takes(100))
    assert interleave([side], rounds=2) == {"a": [1.0, 1.0]}


def test_ratios_are_paired_before_the_median_is_taken() -> None:
    ours, theirs = [1.0, 10.0, 2.0], [2.0, 30.0, 10.0]
    assert paired_ratios(ours, theirs) == [2.0, 3.0, 5.0]
    assert spread(paired_ratios(ours, theirs)).median == 3.0  # medians apart would give 10 / 2
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Spread(3.0, 3.0, 3.0)),
        ([6.0, 1.0, 3.0, 2.0, 5.0, 4.0], Spread(2.0, 3.5, 5.0)),
        ([1.0, 2.0], Spread(1.2, 1.5, 1.8)),
    ],
)
def test_a_spread_reaches_from_the_20th_to_the_80th_percentile(
    values: list[float], expected: Spread
) -> None:
    assert spread(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("round_seconds", "expected"), [(10.0, 6), (0.5, 14), (0.44, 16), (1e-5, 200), (0.0, 200)]
)
def test_rounds_fit_the_budget_and_are_even(round_seconds: float, expected: int) -> None:
    assert rounds_for(round_seconds, budget_seconds=7.0, least=6, most=200) == expected


# rows and runner


def test_every_row_of_the_promise_has_its_target() -> None:
    assert {row.name: row.at_least for row in ROWS if row.at_least is not None} == {
        "gpt2-small-float32": 2.2,
        "gpt2-small-bfloat16": 2.6,
        "gpt2-small-float16": 6.0,
        "gpt2-small-float32-clipped": 1.05,
        "gpt2-small-bfloat16-clipped": 1.2,
        "gpt2-small-float16-clipped": 2.8,
        "gpt2-small-float32-inf": 8.0,
        "2000x1024-float32-warm": 6.0,
        "2000x1-float32-warm": 5.0,
        "statistics-gpt2-small": 20.0,
        "read-rate": 0.85,
        "step-adamw-read": 1 / 1.05,
        "step-adamw-read-clipped": 1 / 1.05 * 8 / 9,
        "amp-float32-clipped": 1.5,
        "amp-float16-clipped": 1.5,
        "rule-agc-fixed": 1 / 2.2,
        **{f"rule-{name}-fixed": 1 / 1.1 for name in ("adagc", "zclip", "logz", "autoclip")},
    }


@race_rows
@pytest.mark.usefixtures("torch_alone")
def test_each_row_pits_fastclip_against_its_rivals_on_the_bytes_it_says(row: Row) -> None:
    contest = row.build(QUICK)
    names = [side.name for side in contest.sides]
    optional = {peer.name for peer in (*peers.PEERS, *rules.PEERS.values())} - set(TORCH)
    assert {OURS, *row.rivals} - optional - set(peers.NAMES) <= {*names, *contest.gaps}
    assert {*names, *contest.gaps} <= {OURS, *row.rivals}
    assert len(set(names)) == len(names) >= 2
    assert set(contest.rivals()) <= set(names)
    interleave(contest.sides, rounds=2)  # every side judges its own results
    checks = [side.check for side in contest.sides if isinstance(side.check, partial)]
    problems = [argument for check in checks for argument in check.args]
    for problem in problems:
        if isinstance(problem, Clip):
            assert problem.clips == ("clipped" in row.name)
            assert (problem.n_bytes, problem.n_tensors) == (contest.n_bytes, contest.n_tensors)


def test_names_of_rows_and_sides_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(len({OURS, *row.rivals}) == 1 + len(row.rivals) for row in ROWS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_has_rows_in_every_dtype_clipped_and_not(workload: str) -> None:
    found = {(row.dtype, row.clips) for row in ROWS if row.workload == workload}
    expected = {(dtype, clips) for dtype in DTYPES for clips in (False, True)}
    missing = {("mixed", False), ("mixed", True)} if workload == "one" else set()
    assert expected - found == missing


@pytest.mark.usefixtures("torch_alone")
def test_a_side_that_does_not_clip_ends_the_run() -> None:
    (row,) = (row for row in ROWS if row.name == "2000x1024-float32-clipped")
    ours = next(side for side in row.build(QUICK).sides if side.name == OURS)
    lazy = Side(ours.name, lambda: torch.tensor(1e9), ours.before, ours.check)
    with pytest.raises(RuntimeError, match=r"returned a norm of 1e\+09, where"):
        interleave([lazy], rounds=1)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_only_a_warm_list_is_found_in_the_cache(warm: bool) -> None:
    problem = functions.problem(QUICK, "2000x1024", "float32", warm=warm)
    assert (len(problem.copies()) == 1) is warm


def test_the_limit_is_bytes_over_rates() -> None:
    rates = Rates(read=50.0, write=1.0, rewrite=25.0, copy=1.0)
    assert least_seconds(100, reads=1, writes=0, rates=rates) == 2.0
    assert least_seconds(100, reads=1, writes=1, rates=rates) == 6.0


@pytest.mark.usefixtures("torch_alone")
def test_a_row_gives_every_side_its_ratio_and_its_share_of_the_limit() -> None:
    (row,) = (row for row in ROWS if row.name == "resnet50-mixed-clipped")
    measured = run(row, QUICK)
    assert [timing.side for timing in measured.timings] == [OURS, *TORCH]
    assert measured.baseline in TORCH
    assert measured.baseline_timing.ratio == Spread(1.0, 1.0, 1.0)
    assert measured.rates is not None
    floor = least_seconds(measured.n_bytes, 1, 1, measured.rates) * 1e3
    assert measured.floor_ms == pytest.approx(floor)
    for timing in measured.timings:
        assert len(timing.seconds) == measured.rounds
        expected = None if measured.host else pytest.approx(floor / timing.ms.median)
        assert timing.of_floor == expected
        assert timing.ms.low <= timing.ms.median <= timing.ms.high


def test_the_read_rate_is_judged_against_the_faster_of_torchs_reads() -> None:
    (row,) = (row for row in ROWS if row.name == "read-rate")
    measured = run(row, QUICK)
    assert measured.baseline in ("sum", "aminmax")
    assert measured.limit == 1.0
    assert measured.ratio.low <= measured.ratio.median <= measured.ratio.high


@pytest.mark.parametrize(
    ("ratio", "at_least", "met"),
    [(2.0, 2.0, True), (1.99, 2.0, False), (math.nan, 2.0, False), (2.0, None, None)],
)
def test_a_target_is_met_at_its_value(ratio: float, at_least: float | None, met: object) -> None:
    assert result(ratio, at_least).met is met


# memory


@pytest.mark.skipif(memory.why_not() is not None, reason=str(memory.why_not()))
def test_extra_memory_sees_a_temporary_that_is_gone_afterwards() -> None:
    def temporary() -> float:
        return float(torch.ones(4 << 20).sum())  # 16 MiB

    temporary()  # what it leaves free in malloc must not hide the next one
    mib = 1 << 20
    assert 15 * mib < memory.extra_bytes(temporary) < 18 * mib
    assert memory.extra_bytes(lambda: None) < mib / 2


# report, command line


@pytest.mark.parametrize(
    "row",
    [
        result(123.4, 20.0),
        result(0.5, None),
        MemoryResult(
            *("m", "extra memory, bfloat16, clipped", "gpt2-small", "bfloat16"),
            {OURS: 999 << 20, "torch foreach": 999 << 20},
            {"timm": "no module named timm"},
            allowed=1 << 20,
        ),
    ],
    ids=["many digits", "slower", "memory"],
)
def test_the_table_has_100_columns_and_names_what_is_missing(row: Result | MemoryResult) -> None:
    lines = [HEADER, line(row), *peer_lines(row)]
    assert max(map(len, lines)) <= WIDTH == 100
    assert lines[-1].split("  ")[-1] == "no module named timm"


def test_losses_are_told_as_plainly_as_wins() -> None:
    assert line(result(0.5, None)).endswith("slower")
    assert line(result(0.5, 0.6)).endswith("below")
    lost = footing([result(0.5, None), result(2.0, None)])
    assert "a rival was faster in 1 of 2 rows:" in lost
    assert lost.endswith("torch foreach is 2.00 times faster")
    assert footing([result(2.0, None)]).endswith("a rival was faster in 0 of 1 rows")


@pytest.mark.parametrize("ratio", [Spread(0.9, 0.95, 1.1), Spread(0.994, 0.996, 0.998)])
def test_a_difference_within_the_spread_or_the_digits_is_no_loss(ratio: Spread) -> None:
    ours = replace(timing(OURS, 1.0, 1.0), ratio=ratio, seconds=tuple(1 / part for part in ratio))
    rival = replace(timing("torch foreach", 1.0, 1.0), seconds=(1.0, 1.0, 1.0))
    close = replace(result(1.0, None), timings=(ours, rival))
    assert line(close).endswith("  ~")
    told = footing([close])
    assert "a rival was faster in 0 of 1 rows" in told
    assert "times faster" not in told
    assert told.endswith(f"  {close.name}: torch foreach")


def test_the_host_decides_where_memory_takes_less_than_a_fifth_of_the_time() -> None:
    (row,) = (row for row in ROWS if row.name == "2000x1-float32")
    measured = run(row, QUICK)
    assert measured.host
    assert measured.limit is None
    assert all(timing.of_floor is None for timing in measured.timings)
    assert " host " in line(measured)
    assert "host" not in line(result(2.0, None))


def test_a_record_can_stand_alone() -> None:
    ours, theirs, gap = records(result(2.0, 3.0))
    assert (ours["side"], ours["ratio"], ours["at_least"], ours["met"]) == (OURS, 2.0, 3.0, False)
    assert (ours["ratio_p20"], ours["ratio_p80"], ours["of_floor"]) == (1.8, 2.2, 0.5)
    assert (ours["read_gbs"], ours["copy_gbs"], ours["floor_ms"]) == (30.0, 15.0, 50.0)
    assert (theirs["side"], theirs["ratio"]) == ("torch foreach", 1.0)
    assert "met" not in theirs
    assert (gap["side"], gap["gap"]) == ("timm", "no module named timm")
    assert "ratio" not in gap
    assert ours["name"] == theirs["name"] == gap["name"]


@pytest.mark.usefixtures("torch_alone")
def test_a_quick_run_works_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    arguments = ["--quick", "--threads", "1", "--csv", str(path), "--filter", "gpt2-small"]
    assert cpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 200  # a warning is one long line
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in cpu.NAMES if "gpt2-small" in name]
    assert list(dict.fromkeys(row["name"] for row in rows)) == names
    for row in rows:
        assert row["title"] in printed
        assert row["torch"] == torch.__version__
        assert row["threads"] == "1"
        assert all(row[key] for key in ("cpu", "commit", "backend", "kernels", "date"))
        assert float(row["ratio"]) > 0
        assert float(row["floor_ms"]) > 0


@pytest.mark.skipif(memory.why_not() is not None, reason=str(memory.why_not()))
def test_memory_is_measured_for_every_peer_or_said_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cpu.main(["--quick", "--filter", "memory-float32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["side"] for row in rows][:3] == [OURS, *TORCH]
    assert {row["side"] for row in rows} == {OURS, *peers.NAMES}
    assert all(("gap" in row) != ("extra_bytes" in row) for row in rows)


@pytest.mark.usefixtures("torch_alone")
def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--json", "--filter", "2000x1-float32", "--backend", "reference"]
    assert cpu.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "reference"
    names = dict.fromkeys(row["name"] for row in report["rows"])
    assert list(names)[:2] == ["2000x1-float32", "2000x1-float32-clipped"]


def test_lists_that_take_long_are_measured_when_asked_for() -> None:
    assert all(row.name in cpu.NAMES for row in ROWS if row.big)
    assert cpu.BIG == {row.name for row in ROWS if row.big}
    assert "gpt2-xl-float32" in cpu.BIG
    assert "gpt2-xl-bfloat16" not in cpu.BIG
    with pytest.raises(SystemExit):
        cpu.main(["--quick", "--filter", "gpt2-xl-float32"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "nothing"], "no row's name contains 'nothing'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--quick", "--check"], "--check judges the full sizes"),
        (["--csv", "no/such/folder/x.csv"], "the folder of --csv no/such/folder/x.csv"),
        (["--quick", "--backend", "abacus"], "abacus"),
    ],
)
def test_wrong_input_is_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cpu.main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "status"), [(9.0, 0), (1.0, 1)])
def test_check_turns_a_missed_target_into_exit_status_1(
    ratio: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "run", lambda row, size: replace(result(ratio, None), row=row))
    assert cpu.main(["--filter", "float32-inf", "--check"]) == status
    assert cpu.main(["--filter", "float32-inf"]) == 0
