"""The gate: a kernel that is too slow fails it, noise does not, and what is not judged is said."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

import fastclip
from benchmarks import gate
from benchmarks.gate import Verdict
from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import functions, machine
from fastclip.benchmarking.contest import FULL, OURS, QUICK, Contest, Row, Size
from fastclip.benchmarking.measure import Side

TARGET = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only what is measured moves on."""
    now = [0.0]
    monkeypatch.setattr("fastclip.benchmarking.measure.time.perf_counter", lambda: now[0])
    return now


def contest(clock: list[float], ratios: list[float]) -> Row:
    """A row whose first measurement gives the first of `ratios`, the next one the next."""
    left = iter(ratios)

    def takes(seconds: float) -> Callable[[], None]:
        def run_it() -> None:
            clock[0] += seconds

        return run_it

    def never() -> None:
        raise AssertionError("the gate compares with torch alone")

    def build(size: Size) -> Contest:
        sides = [Side("torch", takes(next(left))), Side(OURS, takes(1.0)), Side("peer", never)]
        return Contest(sides, n_bytes=8, n_tensors=1, baselines=("torch",))

    return Row("fake", "a fake contest", build, TARGET)


def busy(monkeypatch: pytest.MonkeyPatch, cores: list[float]) -> None:
    """What other programs took during each measurement."""
    left = iter(cores)
    found = SimpleNamespace(busy_cores=lambda: next(left))
    monkeypatch.setattr(machine, "Others", lambda: found)


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: 2)
    busy(monkeypatch, [0.0] * 10)


def judge(row: Row) -> Verdict:
    (verdict,) = gate.judge([row], QUICK, print)
    return verdict


@pytest.mark.parametrize(
    ("ratios", "measured", "met"),
    [
        ([9.0], 1, True),
        ([4.0], 1, True),  # 80 % of 5
        ([3.9, 3.9, 3.9], 3, False),
        ([0.1, 5.0], 2, True),
        ([0.1, 0.1, 4.5], 3, True),
    ],
    ids=["fast", "at the limit", "too slow", "noise once", "noise twice"],
)
def test_a_row_fails_only_if_it_is_too_slow_every_time(
    ratios: list[float], measured: int, met: bool, clock: list[float]
) -> None:
    verdict = judge(contest(clock, ratios))
    assert verdict.clean == pytest.approx(ratios[:measured])
    assert (verdict.met, verdict.failed) == (met, not met)


@pytest.mark.parametrize(("ratio", "word"), [(1.0, "TOO SLOW"), (9.0, "ok")], ids=["slow", "fast"])
def test_what_was_disturbed_counts_neither_for_nor_against(
    ratio: float, word: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is too slow is found out in between, one that is fast has to be it alone."""
    busy(monkeypatch, [0.0, 1.0, 0.0, 1.0, 0.16, 0.0] if ratio < TARGET else [1.0, 0.0])
    disturbed = [9.0, 1.0, 9.0] if ratio < TARGET else [1.0]
    order = [ratio, 9.0, ratio, 1.0, 9.0, ratio] if ratio < TARGET else [1.0, ratio]
    verdict = judge(contest(clock, order))
    assert verdict.disturbed == pytest.approx(disturbed)
    assert verdict.clean == pytest.approx([ratio] * (3 if ratio < TARGET else 1))
    assert str(verdict).startswith(word)


def test_when_time_is_over_what_has_no_verdict_is_not_judged(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disturbed row waits for the other, and neither is measured a second time."""
    now = iter([0.0, 1.0, 2.0, 1e6])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    busy(monkeypatch, [0.5, 0.0])
    rows = [contest(clock, [9.0]), replace(contest(clock, [1.0]), name="another")]
    verdicts = gate.judge(rows, QUICK, print)
    assert not any(verdict.judged for verdict in verdicts)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("not judged fake ")
    assert "disturbed: 9.00x (target 5x, limit 4x): other programs kept 0.50 of 2 cores" in first
    assert second.split()[:4] == ["not", "judged", "another", "1.00x"]


@pytest.mark.parametrize(
    ("cores", "taken", "clean"),
    [(2, 0.15, True), (2, 0.16, False), (16, 1.0, True), (16, 1.3, False), (2, None, True)],
)
def test_a_disturbance_is_a_share_of_the_cores(
    cores: int, taken: float | None, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: cores)
    assert (gate.disturbance(taken) is None) == clean


def test_a_nan_is_not_a_speed() -> None:
    assert Verdict("row", 0.1, [math.nan] * gate.TRIES).failed


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "why_not", lambda: None)


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize(("ratio", "status"), [(2.0, 1), (9.0, 0)], ids=["slow", "fast"])
def test_the_command_says_which_row_is_too_slow(
    ratio: float,
    status: int,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = replace(contest(clock, [9.0]), name="another")
    monkeypatch.setattr(gate, "ROWS", [contest(clock, [ratio] * gate.TRIES), other])
    monkeypatch.setattr(gate, "SIZE", QUICK)
    assert gate.main([]) == status
    first, second, *rest = capsys.readouterr().out.splitlines()
    if status:
        assert first.split() == "TOO SLOW fake 2.00x, 2.00x, 2.00x (target 5x, limit 4x)".split()
        assert rest[-1] == "benchmarks.gate: too slow, 3 times each: fake"
    else:
        assert first.split() == "ok fake 9.00x (target 5x, limit 4x)".split()
    assert second.split()[:3] == ["ok", "another", "9.00x"]


def test_the_floors_are_those_of_the_rows() -> None:
    assert {row.name: row.at_least for row in gate.ROWS} == {
        row.name: row.at_least for row in functions.ROWS if row.at_least is not None
    }
    assert len(gate.ROWS) == 11
    assert gate.SIZE.shapes("gpt2-small") == FULL.shapes("gpt2-small")


def test_without_the_kernels_nothing_is_judged_and_it_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fastclip.backend("reference"):
        assert gate.main([]) == 0
    assert capsys.readouterr().out.startswith(
        "benchmarks.gate: nothing judged: the targets are of the C++ kernels, and the backend is "
        "reference ("
    )


def test_the_plain_kernels_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "explain", lambda: {"cpu": ("cpu", "first")})
    monkeypatch.setattr(native, "simd", lambda: "plain")
    assert gate.why_not() == (
        "the targets are of the kernels for avx2 and avx512, and these are plain"
    )


def test_rows_without_a_verdict_are_counted_and_named_and_fail_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "why_not", lambda: None)
    monkeypatch.setattr(gate, "SECONDS", 0.0)
    assert gate.main([]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == len(gate.ROWS)
    assert last == "benchmarks.gate: 11 of 11 rows not judged: " + ", ".join(
        row.name for row in gate.ROWS
    )


def test_on_one_core_nothing_is_judged_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "explain", lambda: {"cpu": ("cpu", "first")})
    monkeypatch.setattr(native, "simd", lambda: "avx2")
    monkeypatch.setattr(machine, "n_cores", lambda: 1)
    assert gate.main([]) == 0
    assert capsys.readouterr().out == (
        "benchmarks.gate: nothing judged: the targets are for 2 threads, and there is 1 core\n"
    )
