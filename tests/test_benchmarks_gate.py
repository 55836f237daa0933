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


def idle(monkeypatch: pytest.MonkeyPatch, complaints: list[str | None]) -> None:
    """What is found out about the machine after each measurement that missed."""
    left = iter(complaints)
    found = SimpleNamespace(complaint=lambda: next(left))
    monkeypatch.setattr(machine, "Others", lambda: SimpleNamespace(idleness=lambda: found))


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    idle(monkeypatch, [None] * gate.TRIES)


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
    verdict = gate.judge(contest(clock, ratios), QUICK)
    assert verdict.ratios == pytest.approx(ratios[:measured])
    assert (verdict.met, verdict.failed) == (met, not met)


def test_a_slow_row_on_a_busy_machine_is_not_judged(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(monkeypatch, [None, "a neighbour", None])
    verdict = gate.judge(contest(clock, [1.0, 1.0, 1.0]), QUICK)
    assert (verdict.met, verdict.failed) == (False, False)
    assert str(verdict).startswith("not judged fake ")
    assert str(verdict).endswith("limit 4x): a neighbour")


def test_a_nan_is_not_a_speed() -> None:
    assert Verdict("row", 0.1, [math.nan]).failed


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


def test_on_one_core_nothing_is_judged_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "explain", lambda: {"cpu": ("cpu", "first")})
    monkeypatch.setattr(machine, "n_cores", lambda: 1)
    assert gate.main([]) == 0
    assert capsys.readouterr().out == (
        "benchmarks.gate: nothing judged: the targets are for 2 threads, and there is 1 core\n"
    )
