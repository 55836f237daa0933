"""The benchmark's own logic: what it measures is what it says, and small runs work end to end."""

import csv
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import cpu
from benchmarks.rows import ROWS
from fastclip.benchmarking import memory
from fastclip.benchmarking.contest import OURS, QUICK, Row
from fastclip.benchmarking.machine import Idleness
from fastclip.benchmarking.measure import (
    Side,
    Spread,
    interleave,
    paired_ratios,
    rounds_for,
    spread,
)
from fastclip.benchmarking.memory import MemoryResult
from fastclip.benchmarking.report import HEADER, WIDTH, line
from fastclip.benchmarking.runner import Result, least_seconds, run
from fastclip.benchmarking.workloads import (
    Clip,
    clip,
    gpt2_small,
    gradients,
    many,
    plain_statistics,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = [(300, 7), (65,), (1,)]

race_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def result(ratio: float, at_least: float | None) -> Result:
    return Result(
        name="row",
        title="GPT-2 small, bfloat16, clipped",
        baseline="torch",
        ratio=Spread(ratio, ratio, ratio),
        at_least=at_least,
        limit=1234.5,
        rounds=2,
        baseline_ms=99.999,
        ours_ms=12345.6,
        n_bytes=8,
        read_gbs=30.0,
        write_gbs=20.0,
    )


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
        ([4.0, 1.0, 3.0, 2.0, 5.0], Spread(2.0, 3.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0], Spread(1.75, 2.5, 3.25)),
    ],
)
def test_spread(values: list[float], expected: Spread) -> None:
    assert spread(values) == expected


@pytest.mark.parametrize(
    ("round_seconds", "expected"), [(10.0, 6), (0.5, 14), (0.44, 16), (1e-5, 200), (0.0, 200)]
)
def test_rounds_fit_the_budget_and_are_even(round_seconds: float, expected: int) -> None:
    assert rounds_for(round_seconds, budget_seconds=7.0, least=6, most=200) == expected


# workloads


def test_gpt2_small_is_gpt2_small() -> None:
    shapes = gpt2_small()
    assert len(shapes) == 148
    assert sum(math.prod(shape) for shape in shapes) == 124_439_808
    assert shapes[:2] == [(50257, 768), (1024, 768)]
    assert shapes[2:14] == [
        *[(768,), (768,)],
        *[(768, 2304), (2304,), (768, 768), (768,)],
        *[(768,), (768,)],
        *[(768, 3072), (3072,), (3072, 768), (768,)],
    ]


@each_dtype
def test_gradients_have_memory_of_their_own_and_the_promised_values(dtype: torch.dtype) -> None:
    grads = gradients([*SMALL, (1 << 20, 2)], dtype)
    assert [g.dtype for g in grads] == [dtype] * 4
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 4
    for grad in grads:
        assert grad.abs().min() >= 0.5
        assert grad.abs().max() <= 1.5
    long = grads[-1].view(-1).double()
    assert long.square().mean().item() == pytest.approx(13 / 12, rel=5e-3)
    assert abs(long.mean().item()) < 5e-3


@each_dtype
@pytest.mark.parametrize("shapes", [SMALL, many(50, 16), gpt2_small(width=8)], ids=len)
def test_a_clipped_workload_clips_on_every_repetition(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    problem = clip(shapes, dtype, clips=True)
    assert problem.restore is not None
    originals = [g.clone() for g in problem.gradients]
    for _ in range(5):
        problem.restore()
        assert all(map(torch.equal, problem.gradients, originals))
        norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)
        assert norm > 1.5 * problem.max_norm
        assert problem.is_scaled()
        for grad, original in zip(problem.gradients, originals, strict=True):
            assert (grad.double() / original.double()).max() < 0.7
            assert grad.abs().min() > torch.finfo(dtype).smallest_normal


@each_dtype
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_unclipped_workload_stays_as_it_is(dtype: torch.dtype, norm_type: float) -> None:
    problem = clip(SMALL, dtype, norm_type=norm_type)
    originals = [g.clone() for g in problem.gradients]
    norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm, norm_type)
    assert 0 < norm < 0.7 * problem.max_norm < math.inf
    assert not problem.is_scaled()
    assert all(map(torch.equal, problem.gradients, originals))


def test_the_statistics_baseline_is_right() -> None:
    nan, inf = math.nan, math.inf
    grads = [torch.tensor([3.0, -4.0, 0.0]), torch.tensor([[nan, inf], [-inf, -2.0]])]
    stats = plain_statistics(grads)
    assert stats["norms"][0] == 5.0
    assert stats["norms"][1].isnan()
    assert stats["max_abs"].tolist() == [4.0, 2.0]
    assert stats["nan_count"].tolist() == [0, 1]
    assert stats["inf_count"].tolist() == [0, 2]
    assert stats["zero_count"].tolist() == [1, 0]


# rows and runner


def test_every_row_of_the_promise_has_its_target() -> None:
    assert {row.name: row.at_least for row in ROWS if row.at_least is not None} == {
        "gpt2-float32": 2.2,
        "gpt2-bfloat16": 2.6,
        "gpt2-float16": 6.0,
        "gpt2-float32-clipped": 1.05,
        "gpt2-bfloat16-clipped": 1.2,
        "gpt2-float16-clipped": 2.8,
        "gpt2-float32-inf": 8.0,
        "small-1024": 6.0,
        "small-1": 5.0,
        "statistics": 20.0,
        "read-rate": 0.85,
        "step-adamw-read": 1 / 1.05,
        "step-adamw-read-clipped": 1 / 1.05 * 8 / 9,
        "amp-float32-clipped": 1.5,
        "amp-float16-clipped": 1.5,
        "rule-agc-fixed": 1 / 2.2,
        **{f"rule-{name}-fixed": 1 / 1.1 for name in ("adagc", "zclip", "logz", "autoclip")},
    }


@race_rows
def test_each_row_pits_fastclip_against_torch_on_the_bytes_it_says(row: Row) -> None:
    contest = row.build(QUICK)
    assert [side.name for side in contest.sides].count(OURS) == 1
    assert len(contest.sides) >= 2
    interleave(contest.sides, rounds=2)  # every side judges its own results
    problems = [side.check.args[1] for side in contest.sides if isinstance(side.check, partial)]
    for problem in problems:
        assert isinstance(problem, Clip)
        assert problem.clips == row.name.endswith("clipped")
        assert problem.n_bytes == contest.n_bytes


def test_a_side_that_does_not_clip_ends_the_run() -> None:
    (row,) = (row for row in ROWS if row.name == "small-1024-clipped")
    ours = next(side for side in row.build(QUICK).sides if side.name == OURS)
    lazy = Side(ours.name, lambda: torch.tensor(1e9), ours.before, ours.check)
    with pytest.raises(RuntimeError, match="kept the gradients; this workload is to be clipped"):
        interleave([lazy], rounds=1)


def test_the_limit_is_bytes_over_rates() -> None:
    assert least_seconds(100, reads=1, writes=0, read=50.0, write=25.0) == 2.0
    assert least_seconds(100, reads=1, writes=1, read=50.0, write=25.0) == 6.0


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


# machine, report, command line


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        (Idleness(0.0, 0.02, 25.0), None),
        (Idleness(9.0, None, 25.0), None),
        (Idleness(0.0, 1.0, 25.0), "1.00 cores busy"),
        (Idleness(0.0, None, 8000.0), "8000 us"),
    ],
)
def test_only_a_busy_machine_is_complained_about(idle: Idleness, words: str | None) -> None:
    complaint = idle.complaint()
    assert (complaint is None) == (words is None)
    assert words is None or words in str(complaint)


@pytest.mark.parametrize(
    "row",
    [
        result(123.4, 20.0),
        result(0.5, 20.0),
        MemoryResult("m", "extra memory, bfloat16, clipped", 999 << 20, 999 << 20, 1 << 20),
    ],
    ids=["many digits", "below", "memory"],
)
def test_the_table_has_100_columns(row: Result | MemoryResult) -> None:
    assert len(HEADER) <= WIDTH == 100
    assert len(line(row)) <= WIDTH


def test_a_quick_run_works_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    assert cpu.main(["--quick", "--threads", "1", "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 200  # a warning is one long line
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    measurable = cpu.NAMES if memory.why_not() is None else [row.name for row in ROWS]
    assert [row["name"] for row in rows] == measurable
    for row in rows:
        assert row["title"] in printed
        assert row["torch"] == torch.__version__
        assert row["threads"] == "1"
        assert all(row[key] for key in ("cpu", "commit", "backend", "kernels", "date"))
    assert all(float(row["ratio"]) > 0 for row in rows if row["name"] in {r.name for r in ROWS})


def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["--quick", "--json", "--filter", "small-1", "--backend", "reference"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "reference"
    names = [row["name"] for row in report["rows"]]
    assert names == ["small-1024", "small-1024-clipped", "small-1"]


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
    monkeypatch.setattr(cpu, "run", lambda row, size: result(ratio, row.at_least))
    assert cpu.main(["--filter", "gpt2-float32-inf", "--check"]) == status
    assert cpu.main(["--filter", "gpt2-float32-inf"]) == 0
