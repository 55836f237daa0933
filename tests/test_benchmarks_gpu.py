"""The benchmark of the GPU backends, on a CPU that plays the card."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gpu, gpu_session, gpu_sides, style
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_session import Card, Limits, Session
from benchmarks.gpu_sides import clip_sides, step_sides
from benchmarks.gpu_works import FULL, QUICK, Work
from benchmarks.problems import RATES, Problem, both, made_on
from benchmarks.records import number, read
from fastclip.benchmarking.measure import Side
from tests.card import FakeCuda

SHAPES = ((64, 8), (64,), (1,))
LIMITS = Limits(read=4e9, scale=2e9, copy=1e9)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(gpu_sides, "BACKENDS", ("reference",))
    monkeypatch.setitem(style.SIDES, "fastclip-reference", style.BLUE)
    return Card("Fake 100", "cpu", FakeCuda())


@pytest.fixture
def session(card: Card) -> Session:
    plan = replace(QUICK, seconds=0.0, least_rounds=2)
    return Session(card, plan, LIMITS, gpu_sides.missing())


# clock


def ticking(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds


def test_the_device_is_timed_between_events_behind_a_sleep() -> None:
    """In this order: gradients put back, cache written, device idle, asleep, first event, call."""
    ticks = ticking(0.002)
    cuda = FakeCuda(clock=lambda: next(ticks))
    clock = Clock(lambda: cuda.log.append("flush"), cuda)
    note = cuda.log.append
    side = Side("a", lambda: note("call"), lambda: note("before"), lambda _: note("check"))
    assert clock.device_us(side, host_us=50.0) == pytest.approx(2000.0)
    assert cuda.log == [
        *["before", "flush", "synchronize", "sleep 400000", "record", "call", "record"],
        *["synchronize", "check"],
    ]


def test_the_sleep_has_an_end() -> None:
    cuda = FakeCuda()
    Clock(None, cuda).device_us(Side("a", lambda: None), host_us=1e9)
    assert "sleep 2000000000" in cuda.log  # a second at 2 GHz


def test_the_host_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.gpu_clock.time.perf_counter", lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    cuda = FakeCuda()
    side = Side("a", lambda: takes(1), lambda: takes(10), lambda _: takes(100))
    assert Clock(lambda: takes(1000), cuda).host_us(side) == 1e6
    assert "record" not in cuda.log
    assert not any(entry.startswith("sleep") for entry in cuda.log)


def test_rounds_alternate_and_have_both_times() -> None:
    log: list[str] = []
    sides = [Side(name, partial(log.append, name)) for name in "ab"]
    times = Clock(None, FakeCuda()).race(sides, rounds=2)
    assert "".join(log) == "aabb" + "bbaa"
    assert {name: (len(t.device), len(t.host)) for name, t in times.items()} == {
        "a": (2, 2),
        "b": (2, 2),
    }


@pytest.mark.parametrize(("n_bytes", "flushes"), [(2 << 20, True), ((2 << 20) + 1, False)])
def test_only_what_fits_twice_the_cache_is_flushed(card: Card, n_bytes: int, flushes: bool) -> None:
    assert (card.clock(n_bytes)._flush is not None) == flushes


def test_extra_memory_is_the_peak_above_what_was_there(card: Card) -> None:
    assert card.extra_bytes(Side("a", lambda: None)) == 512


# sides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("clips", [False, True], ids=["alone", "clipped"])
def test_every_side_clips_the_same_gradients_again_and_again(
    session: Session, dtype: str, clips: bool
) -> None:
    work = Work("workloads", "small", SHAPES, dtype)
    problem = both(made_on("cpu", work.shapes, work.dtypes))[clips]
    sides = clip_sides(problem, session.absent)
    assert [side.name for side in sides] == ["torch", "fastclip-reference"]
    Clock(None, FakeCuda()).race(sides, rounds=4)  # every side judges its own results
    assert problem.gradients[0].view(-1)[0].item() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("clips", [False, True], ids=["alone", "clipped"])
def test_steps_step_and_start_from_the_same_gradients(session: Session, clips: bool) -> None:
    problem = both(made_on("cpu", SHAPES, [torch.float32] * 3))[clips]
    sides = step_sides(problem, session.absent)
    assert [side.name for side in sides] == ["torch", "fastclip-reference"]
    original = [grad.clone() for grad in problem.gradients]
    for side in sides:
        assert side.before is not None
        side.before()
        assert all(map(torch.equal, problem.gradients, original))
        weight = problem.parameters[0].detach().clone()
        norm = side.run()
        assert not torch.equal(problem.parameters[0], weight)
        assert float(norm) == pytest.approx(
            problem.max_norm * (2 if clips else 0.5) / gpu_sides.LOSS_SCALE, rel=0.1
        )
    (side, *_) = sides
    assert side.check is not None
    with pytest.raises(RuntimeError, match="torch returned 0 times the threshold"):
        side.check(torch.tensor(0.0))


class Apex:
    """As `amp_C` and `apex.multi_tensor_apply` are: enough of them to see the right calls."""

    @staticmethod
    def multi_tensor_applier(
        operator: object, flag: Tensor, lists: list[list[Tensor]], *arguments: object
    ) -> object:
        assert flag.dtype == torch.int
        return operator(lists, *arguments)  # type: ignore[operator]

    @staticmethod
    def multi_tensor_l2norm(
        lists: list[list[Tensor]], per_tensor: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert per_tensor is False
        return torch.nn.utils.get_total_norm(lists[0]).view(1), None

    @staticmethod
    def multi_tensor_scale(lists: list[list[Tensor]], coef: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * coef)


def test_apex_is_called_as_megatron_calls_it(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setattr("benchmarks.gpu_sides.importlib.import_module", lambda name: Apex)
    absent = {"transformer_engine": "not here", "fastclip-reference": "not asked for"}
    for problem in both(made_on("cpu", SHAPES, [torch.float32] * 3)):
        sides = clip_sides(problem, absent)
        assert [side.name for side in sides] == ["torch", "apex"]
        Clock(None, FakeCuda()).race(sides, rounds=2)
    mixed = both(made_on("cpu", SHAPES, [torch.float32, torch.bfloat16, torch.float32]))[0]
    assert [side.name for side in clip_sides(mixed, absent)] == ["torch"]


def test_what_is_missing_has_a_reason(card: Card) -> None:
    missing = gpu_sides.missing()
    assert "fastclip-reference" not in missing
    assert missing["transformer_engine"].startswith("ModuleNotFoundError: No module named")


# rows


def test_limits_are_bytes_over_rates() -> None:
    assert LIMITS.floor_us(4000, clips=False) == pytest.approx(1.0)
    assert LIMITS.floor_us(4000, clips=True) == pytest.approx(3.0)


def test_the_share_counts_what_is_read_and_written() -> None:
    """A copy at 1 GB/s reads and writes 2 GB a second; a clip passes over its bytes three times."""
    assert LIMITS.share_of_copy(1000, clips=False, us=1.0) == pytest.approx(0.5)
    assert LIMITS.share_of_copy(1000, clips=True, us=1.0) == pytest.approx(1.5)


def test_a_work_has_a_row_for_each_side_not_clipped_and_clipped(session: Session) -> None:
    rows = list(session.measure(Work("workloads", "small", SHAPES)))
    assert [(row["side"], row["clips"]) for row in rows] == [
        *[("torch", False), ("fastclip-reference", False)],
        *[("torch", True), ("fastclip-reference", True)],
    ]
    for row in rows:
        assert row["n_tensors"] == 3
        assert row["n_bytes"] == 4 * 577
        assert row["extra_bytes"] == 512
        share = LIMITS.share_of_copy(4 * 577, row["clips"] is True, float(str(row["us"])))
        assert row["share_of_copy"] == pytest.approx(share)
    assert rows[0]["ratio"] == rows[2]["ratio"] == 1.0
    assert not session.faults


def test_sizes_have_torchs_own_operations_beside_them(session: Session) -> None:
    rows = list(session.measure(Work("bytes", "bytes", ((64,),) * 4)))
    assert [row["side"] for row in rows if row["ratio"] is None] == list(RATES)


@pytest.mark.parametrize(
    ("name", "left", "faults"),
    [("apex", ["torch", "fastclip-reference"], 0), ("fastclip-reference", ["torch"], 1)],
)
def test_who_fails_is_left_out_and_the_others_race_on(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    left: list[str],
    faults: int,
) -> None:
    session.absent.pop(name, None)

    def with_one_that_fails(problem: Problem, absent: dict[str, str]) -> list[Side]:
        def fail() -> None:
            raise ValueError("a kernel went wrong")

        sides = [side for side in clip_sides(problem, {**absent, "apex": ""}) if side.name != name]
        return sides if name in absent else [*sides, Side(name, fail)]

    monkeypatch.setattr(gpu_session, "clip_sides", with_one_that_fails)
    rows = list(session.measure(Work("workloads", "small", SHAPES)))
    assert [row["side"] for row in rows if row["clips"] is False] == left
    words = f"small, float32: {name} left out, ValueError: a kernel went wrong"
    assert words in capsys.readouterr().err
    assert len(session.faults) == 2 * faults


def test_without_torch_there_is_no_row(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", fail)
    assert list(session.measure(Work("workloads", "small", SHAPES))) == []
    assert "small, float32: torch left out, OutOfMemoryError: too large" in capsys.readouterr().err


def test_works_fit_a_card_and_come_with_sizes_and_counts() -> None:
    sweeps = [work.sweep for work in FULL.works]
    assert list(dict.fromkeys(sweeps)) == ["bytes", "tensors", "steps", "workloads"]
    sizes = [work.n_bytes for work in FULL.works if work.sweep == "bytes"]
    assert (min(sizes), max(sizes)) == (1 << 16, 1 << 34)
    assert {work.dtype for work in FULL.works} == {"float32", "bfloat16", "float16", "mixed"}
    seconds = 2 * len(FULL.works) * FULL.seconds  # not clipped and clipped
    assert seconds < 0.6 * gpu.SECONDS  # the rest is for making gradients and compiling


def test_what_torch_cannot_clip_in_float16_is_no_work() -> None:
    """Llama 3 8B has a norm that float16 does not hold: torch's clip makes it all zeros."""
    dtypes = {work.dtype for work in FULL.works if work.name == "llama3-8b"}
    assert dtypes == {"float32", "bfloat16", "mixed"}
    overflowing = [torch.full((65504,), 300.0, dtype=torch.float16)]
    _, clipped = both(overflowing)
    total = torch.nn.utils.clip_grad_norm_(clipped.parameters, clipped.max_norm)
    assert not overflowing[0].any()
    with pytest.raises(RuntimeError, match="left 0 and 0 of the gradients"):
        clipped.settle("torch", total)


# the command


def test_a_quick_run_works_end_to_end(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    path = tmp_path / "gpu-fake-100.csv"
    arguments = ["--quick", "--csv", str(path), "--pictures", str(tmp_path / "docs")]
    assert gpu.main(arguments, card) == 0
    rows = read(path)
    assert {row["sweep"] for row in rows} == {"bytes", "tensors", "steps", "workloads"}
    for row in rows:
        assert number(row, "us_p20") <= number(row, "us") <= number(row, "us_p80")
        assert (row["card"], row["torch"]) == ("Fake 100", torch.__version__)
        assert all(row[key] for key in ("commit", "date", "python"))
    pictures = sorted(path.name for path in (tmp_path / "docs").iterdir())
    assert pictures == [f"gpu-fake-100-{name}.svg" for name in ("bandwidth", "host", "ratio")]
    printed = capsys.readouterr().out
    assert "apex: left out, ModuleNotFoundError" in printed
    assert max(map(len, printed.splitlines())) <= 200


def test_no_work_is_begun_when_the_time_is_over(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--quick", "--seconds", "-1", "--csv", str(tmp_path / "a.csv")], card)
    out = capsys.readouterr()
    assert out.out.count("left out, -1 s are over") == len(QUICK.works)
    assert "no work was measured" in out.err
    assert not (tmp_path / "a.csv").exists()


def test_what_the_memory_does_not_hold_is_left_out(card: Card) -> None:
    held = Work("workloads", "large", ((3 << 26,),))
    assert card.has_room_for(held)
    assert not card.has_room_for(replace(held, shapes=((1 << 28,),)))
    assert not card.has_room_for(replace(held, sweep="steps"))


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert gpu.main([]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_the_file_is_named_after_the_card() -> None:
    assert gpu.slug("NVIDIA H200") == "nvidia-h200"
    assert gpu.slug("Tesla P100-PCIE-16GB") == "tesla-p100-pcie-16gb"
