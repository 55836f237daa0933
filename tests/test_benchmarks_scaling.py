"""Scaling: what is timed is cold and right, what is fitted is what was put in."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import scaling
from benchmarks.lines import fit
from benchmarks.problems import RATES, both
from benchmarks.records import number, read, write
from benchmarks.scaling import QUICK, Point, Turn, Turns, copies, fitted, size, threads_up_to
from fastclip.benchmarking.machine import n_cores
from fastclip.benchmarking.measure import interleave
from fastclip.benchmarking.models import many
from fastclip.benchmarking.workloads import gradients

KIB, MIB = 1 << 10, 1 << 20

# lines


def test_a_line_is_found_again() -> None:
    xs = [1.0, 10.0, 1e5]
    found = fit(xs, [20 + 0.5 * x for x in xs])
    assert found.fixed == pytest.approx(20)
    assert found.slope == pytest.approx(0.5)
    assert found.off < 1e-9


def test_small_costs_count_as_much_as_large_ones() -> None:
    """10 % at the small end moves the fixed cost, not the slope: least squares of the errors
    themselves would do the opposite."""
    xs = [1.0, 2.0, 4.0, 1e6, 2e6, 4e6]
    ys = [11.0, 11.0, 11.0, 1e6, 2e6, 4e6]
    found = fit(xs, ys)
    assert found.fixed == pytest.approx(10, abs=1.5)
    assert found.slope == pytest.approx(1, rel=0.02)
    errors = [abs(found.fixed + found.slope * x - y) / y for x, y in zip(xs, ys, strict=True)]
    assert found.off == pytest.approx(max(errors))


def test_one_place_makes_no_line() -> None:
    with pytest.raises(ValueError, match=r"two different places, got \[3\.0\]"):
        fit([3.0, 3.0], [1.0, 2.0])


# gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_clip_is_undone_without_drift(dtype: torch.dtype) -> None:
    grads = gradients(many(5, 100), dtype)
    alone, clipped = both(grads)
    originals = [grad.clone() for grad in grads]
    for _ in range(50):
        for problem in (alone, clipped):
            norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)
            problem.settle("torch", norm)
    for grad, original in zip(grads, originals, strict=True):
        torch.testing.assert_close(grad, original, rtol=0.02, atol=0)
    assert 1.8 < norm / clipped.max_norm < 2.2


def test_what_did_not_clip_is_an_error() -> None:
    _, clipped = both(gradients(many(5, 100)))
    with pytest.raises(RuntimeError, match="lazy returned a norm of 1e"):
        clipped.settle("lazy", torch.tensor(1e9))


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(KIB, 90), (4 * MIB, 65), (64 * MIB, 5), (256 * MIB, 2), (1024 * MIB, 1)],
    ids=size,
)
def test_eight_caches_lie_between_two_calls_or_there_is_no_second(
    n_bytes: int, expected: int
) -> None:
    assert copies(n_bytes, cache=32 * MIB, calls=90) == expected


def test_every_call_takes_the_next_turn() -> None:
    """All sides of a round, and of the next, work on different memory until the turns are over."""
    sources = gradients([(64,)] * 18)
    turns = Turns([Turn(both(s.chunk(4)), s, torch.ones_like(s)) for s in sources])
    sides = [*turns.clips(), *turns.rates()]
    assert len(sides) == 4 + len(RATES)
    seen: Counter[int] = Counter()
    for side in sides:
        plain = side.before
        assert plain is not None

        def before(plain: object = plain) -> None:
            plain()  # type: ignore[operator]
            seen[turns._now.source.data_ptr()] += 1

        object.__setattr__(side, "before", before)
    interleave(sides, rounds=2)
    assert set(seen.values()) == {1}
    assert len(seen) == 18


def test_the_sides_are_torch_and_fastclip_left_alone_and_clipped() -> None:
    grads = gradients(many(3, 16))
    sides = Turns([Turn(both(grads), grads[0], grads[0])]).clips()
    names = ["torch", "fastclip", "torch clipped", "fastclip clipped"]
    assert [side.name for side in sides] == names
    interleave(sides, rounds=2)  # every side judges its own results


# sweeps


def test_threads_double_up_to_all_cores() -> None:
    assert threads_up_to(1) == [1]
    assert threads_up_to(2) == [1, 2]
    assert threads_up_to(6) == [1, 2, 4, 6]
    assert threads_up_to(8) == [1, 2, 4, 8]


def test_what_memory_does_not_hold_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "available", lambda: MIB)
    points = list(scaling.by_bytes(QUICK, cache=KIB))
    assert {point.n_bytes for point in points} == {KIB, 64 * KIB}
    assert capsys.readouterr().err == "1 MiB: left out, memory is short\n"


def test_a_quick_run_works_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.csv"
    assert scaling.main(["--quick", "--csv", str(path)]) == 0
    rows = read(path)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert " us + " not in printed  # a line through three tiny points says nothing
    assert {row["sweep"] for row in rows} == {"tensors", "bytes", "threads"}
    for row in rows:
        assert number(row, "us_p20") <= number(row, "us") <= number(row, "us_p80")
        assert row["torch"] == torch.__version__
        assert all(row[key] for key in ("cpu", "commit", "date", "kernels", "threads"))
        assert bool(row["ratio"]) == (row["side"] not in RATES)
    sizes = {row["n_bytes"] for row in rows if row["sweep"] == "bytes"}
    assert sizes == {str(n) for n in QUICK.sizes}
    threads = {row["threads"] for row in rows if row["sweep"] == "threads"}
    assert len(threads) == len(threads_up_to(n_cores()))


def test_one_sweep_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.csv"
    assert scaling.main(["--quick", "--sweep", "tensors", "--csv", str(path)]) == 0
    assert {row["n_tensors"] for row in read(path)} == {"1", "10", "100"}


@pytest.mark.parametrize(
    "arguments", [["--quick"], ["--sweep", "tensors"]], ids=["quick", "partial"]
)
def test_what_is_not_the_whole_run_leaves_the_committed_one_alone(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    monkeypatch.setattr(scaling, "FULL", QUICK)
    assert scaling.main(arguments) == 0
    assert "fastclip clipped" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert scaling.main([]) == 0
    assert len(read(tmp_path / "scaling.csv")) > 50


@pytest.mark.parametrize(
    ("slope", "words"),
    [(0.5, "10.0 us + 0.500 us a tensor"), (-0.5, "the slope cannot be told")],
    ids=["up", "down"],
)
def test_times_that_do_not_grow_have_no_slope(slope: float, words: str) -> None:
    points = [
        Point("tensors", side, clips, n, n, "float32", 1, 2, us, us, us)
        for side in ("torch", "fastclip")
        for clips in (False, True)
        for n, us in ((1, 10 + slope), (10, 10 + 10 * slope))
    ]
    found = list(fitted(points))
    assert len(found) == 4
    assert all(words in line for line in found)


# records


def test_rows_come_back_with_four_digits(tmp_path: Path) -> None:
    write(tmp_path / "new" / "a.csv", [{"a": 1.23456, "b": "x, y", "c": None, "d": 123456}])
    (row,) = read(tmp_path / "new" / "a.csv")
    assert row == {"a": "1.235", "b": "x, y", "c": "", "d": "123456"}
    assert number(row, "a") == 1.235
    with pytest.raises(ValueError, match="the field 'c' is empty in"):
        number(row, "c")
