"""Peers of the benchmark: each clips as torch does, and what is missing is a gap with a reason."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from fastclip.benchmarking import peers
from fastclip.benchmarking.contest import OURS, QUICK
from fastclip.benchmarking.measure import interleave
from fastclip.benchmarking.models import Shape
from fastclip.benchmarking.peers import NAMES, PEERS, TORCH, Peer
from fastclip.benchmarking.workloads import Clip, clip

SHAPES: list[Shape] = [(30, 7), (65,), (1,)]
TINY: list[Shape] = [(3,)]


def idle(problem: Clip) -> peers.Call:
    return lambda: None


def peer(module: str) -> Peer:
    return Peer("other", "a function", idle, module=module)


@pytest.mark.parametrize("clips", [False, True], ids=["left alone", "clipped"])
@pytest.mark.parametrize("chosen", PEERS, ids=NAMES)
@pytest.mark.filterwarnings("default")
def test_a_peer_does_what_the_row_says(chosen: Peer, clips: bool) -> None:
    if reason := chosen.missing():
        pytest.skip(reason)
    contest = peers.contest(clip(SHAPES, clips=clips), QUICK, [chosen, *PEERS[:2]])
    assert contest.gaps == {}
    assert chosen.note() == contest.notes[chosen.name]
    (side,) = {side.name: side for side in contest.sides if side.name == chosen.name}.values()
    interleave([side], rounds=3)


@pytest.mark.filterwarnings("default")
def test_optax_reads_the_gradients_where_they_are_and_leaves_them() -> None:
    optax = next(peer for peer in PEERS if peer.name == "optax")
    if reason := optax.missing():
        pytest.skip(reason)
    problem = clip(SHAPES, clips=True, copies=2)
    side = optax.side(problem)
    for _ in range(3):
        problem.restore()
        before = [grad.clone() for grad in problem.gradients]
        results = side.run()
        assert all(map(torch.equal, before, problem.gradients))
        for result, grad in zip(results, before, strict=True):
            clipped = from_dlpack(result)
            norm = torch.cat([one.flatten() for one in before]).norm()
            torch.testing.assert_close(clipped, grad * (problem.max_norm / norm))
    problem.gradients[0].mul_(3.0)
    assert float(from_dlpack(side.run()[1])[0]) != float(from_dlpack(results[1])[0])


def test_a_missing_package_is_a_named_gap() -> None:
    contest = peers.contest(clip(TINY), QUICK, [*PEERS[:2], peer("no_such_peer.clip")])
    assert contest.gaps == {"other": "no module named no_such_peer"}
    assert [side.name for side in contest.sides] == [OURS, *TORCH]
    assert contest.rivals() == TORCH


def test_a_package_that_fails_to_import_is_a_gap_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('no CUDA_HOME\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = peer("broken_peer").missing()
    assert reason == "broken_peer does not import: OSError: no CUDA_HOME"
    assert "broken_peer" not in sys.modules


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: torch.zeros(()), "wrong result: other returned a norm of 0, where"),
        (lambda: 1 // 0, "fails: ZeroDivisionError: integer division"),
    ],
    ids=["does not clip", "raises"],
)
def test_a_peer_that_gets_it_wrong_is_a_gap(call: peers.Call, reason: str) -> None:
    wrong = Peer("other", "a function", lambda problem: call, module="torch")
    contest = peers.contest(clip(TINY, clips=True), QUICK, [*PEERS[:2], wrong])
    assert contest.gaps["other"].startswith(reason)
    assert [side.name for side in contest.sides] == [OURS, *TORCH]


def test_what_a_peer_cannot_take_is_said_before_it_tries() -> None:
    picky = Peer("other", "a function", idle, in_place=False, only_l2=True, most_tensors=3)
    assert picky.why_not(clip(TINY), QUICK.memory_bytes) is None
    assert picky.why_not(clip(TINY, norm_type=1.0), 1 << 30) == "it has the L2 norm only"
    assert picky.why_not(clip(TINY * 4), 1 << 30) == "its compiler takes too long for 4 tensors"
    reason = picky.why_not(clip([(1 << 14,)]), memory_bytes=1 << 16)
    assert reason == "its results beside the gradients take 0.0 GiB"
    assert picky.note() == "out of place"
    narrow = Peer("other", "a function", idle, sums_in_float16=True)
    long: list[Shape] = [(70_000,)]
    assert narrow.why_not(clip(long), 1 << 30) is None
    half = clip(long, torch.float16)
    assert narrow.why_not(half, 1 << 30) == "its float16 sum of squares overflows"


def test_threads_that_the_user_chose_for_xla_are_kept_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optax = next(peer for peer in PEERS if peer.name == "optax")
    monkeypatch.setenv("NPROC", "77")
    assert optax.remark() == "NPROC=77 is kept"
    monkeypatch.setenv("NPROC", str(torch.get_num_threads()))
    assert optax.remark() is None
