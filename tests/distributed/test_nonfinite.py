"""A NaN or an infinity on one rank: all ranks decide alike, and each can name rank and gradient."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed import spoiling
from tests.distributed.ranks import Pool
from tests.distributed.spoiling import Spoiled
from tests.training import same

# layout, ranks, the guilty one, the gradient
CASES = [
    ("fsdp", 2, 1, "embed.weight"),
    ("fsdp", 4, 2, "second.weight"),
    ("fsdp-cpu-offload", 2, 0, "norm.bias"),
    ("fsdp-x-tensor", 4, 3, "first.weight"),
    ("hsdp", 4, 2, "scale"),
]
IDS = [f"{layout}-{size}-{name}-on-{guilty}" for layout, size, guilty, name in CASES]
VALUES = [math.nan, math.inf, -math.inf]


def alike(answers: Sequence[Spoiled], *fields: str) -> None:
    """Asserts that all ranks say the same."""
    for rank, answer in enumerate(answers):
        for field in fields:
            # as text, which is exact, and in which NaN is NaN
            mine, first = repr(getattr(answer, field)), repr(getattr(answers[0], field))
            assert mine == first, f"{field} on rank {rank}"


def names_the_guilty(answer: Spoiled, guilty: int, name: str, value: float) -> None:
    count = (1, 0) if math.isnan(value) else (0, 1)
    assert answer.nonfinite == [name]
    assert answer.counts == {name: count}
    for rank, _, _, nan, inf, names in answer.by_rank:
        is_guilty = rank == guilty
        assert (nan, inf) == (count if is_guilty else (0, 0)), f"rank {rank}"
        assert list(names) == ([name] if is_guilty else []), f"rank {rank}"
    assert f"rank {guilty}" in answer.printed


@pytest.mark.parametrize(("layout", "size", "guilty", "name"), CASES, ids=IDS)
def test_every_rank_skips_and_nothing_moves(
    ranks: Pool, layout: str, size: int, guilty: int, name: str
) -> None:
    for value in VALUES[:2]:
        answers = ranks.run(size, spoiling.step, layout, size, guilty, name, value, "skip")
        alike(answers, "skipped", "found_inf", "total", "nonfinite", "counts", "by_rank")
        for answer in answers:
            assert answer.fault == ""
            assert answer.skipped is True
            assert answer.found_inf == 1.0
            assert not math.isfinite(answer.total)
            assert answer.changed == []
            assert answer.rewritten == []
            assert answer.counters == (2, 1, 1, 1)
            names_the_guilty(answer, guilty, name, value)


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf, -math.inf, 0.0])
def test_every_rank_skips_in_every_norm(ranks: Pool, p: float) -> None:
    answers = ranks.run(4, spoiling.step, "fsdp", 4, 1, "first.bias", math.nan, "skip", norm_type=p)
    alike(answers, "skipped", "found_inf", "total", "nonfinite", "counts")
    for answer in answers:
        assert answer.skipped is True
        assert answer.changed == []
        assert answer.rewritten == []


def test_the_step_after_a_skipped_one_is_as_if_that_had_not_been(ranks: Pool) -> None:
    for skipped, differences, moved in ranks.run(
        4, spoiling.recovered, "fsdp", 4, 3, "embed.weight"
    ):
        assert skipped
        assert differences == []
        assert moved


@pytest.mark.parametrize(("layout", "size", "guilty", "name"), CASES, ids=IDS)
@pytest.mark.parametrize("job", [spoiling.step, spoiling.clip], ids=["step", "clip_"])
def test_error_names_gradient_and_rank_on_every_rank(
    ranks: Pool, job: Any, layout: str, size: int, guilty: int, name: str
) -> None:
    answers = ranks.run(size, job, layout, size, guilty, name, math.nan, "error")
    alike(answers, "fault")
    for answer in answers:
        assert repr(name) in answer.fault
        assert f"rank {guilty}" in answer.fault
        assert "1 NaN" in answer.fault
        assert answer.changed == []
        assert answer.rewritten == []


@pytest.mark.parametrize("called", ["clip_grad_norm_", "get_total_norm"])
def test_error_if_nonfinite_raises_on_every_rank(ranks: Pool, called: str) -> None:
    answers = ranks.run(
        4, spoiling.function, "fsdp-x-tensor", 4, 1, "first.weight", math.inf, called, True
    )
    alike(answers, "fault")
    for answer in answers:
        assert "'first.weight'" in answer.fault
        assert "rank 1" in answer.fault
        assert "1 inf" in answer.fault
        assert answer.rewritten == []


def test_without_an_error_a_nan_reaches_every_gradient_of_every_rank(ranks: Pool) -> None:
    answers = ranks.run(
        4, spoiling.function, "fsdp", 4, 2, "embed.weight", math.nan, "clip_grad_norm_", False
    )
    for answer in answers:
        assert math.isnan(answer.total)
        assert all(bool(grad.isnan().all()) for grad in answer.grads.values())


def test_without_an_error_an_infinity_makes_all_others_zero(ranks: Pool) -> None:
    answers = ranks.run(
        4, spoiling.function, "fsdp", 4, 2, "embed.weight", math.inf, "clip_grad_norm_", False
    )
    for rank, answer in enumerate(answers):
        assert answer.total == math.inf
        spoiled = answer.grads["embed.weight"].view(-1)[:1]
        assert bool(spoiled.isnan().all()) == (rank == 2)
        rest = sum(int((grad != 0).sum()) for grad in answer.grads.values())
        assert rest == (1 if rank == 2 else 0)


def test_grad_stats_names_the_rank_and_changes_nothing(ranks: Pool) -> None:
    answers = ranks.run(
        4, spoiling.function, "fsdp", 4, 0, "second.bias", math.nan, "grad_stats", False
    )
    alike(answers, "found_inf", "nonfinite", "counts", "by_rank")
    for answer in answers:
        assert answer.found_inf == 1.0
        assert answer.rewritten == []
        names_the_guilty(answer, 0, "second.bias", math.nan)


def test_zero_leaves_the_rest_and_every_rank_steps(ranks: Pool) -> None:
    answers = ranks.run(4, spoiling.clip, "fsdp", 4, 2, "first.weight", math.nan, "zero")
    clean = ranks.run(4, spoiling.clip, "fsdp", 4, 2, "first.weight", 0.0, "zero")
    alike(answers, "skipped", "found_inf", "total", "nonfinite", "counts", "by_rank")
    for rank, (answer, as_zero) in enumerate(zip(answers, clean, strict=True)):
        assert answer.skipped is False
        assert answer.found_inf == 0.0
        same(answer.total, as_zero.total)
        same(answer.grads, as_zero.grads, f"rank {rank}")
        names_the_guilty(answer, 2, "first.weight", math.nan)
    stepped = ranks.run(4, spoiling.step, "fsdp", 4, 2, "first.weight", math.nan, "zero")
    assert all(answer.changed for answer in stepped)


@pytest.mark.parametrize("guilty", [(1,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_zero_steps_only_if_copies_are_alike(ranks: Pool, guilty: tuple[int, ...]) -> None:
    """Ranks 1 and 3 hold the same shard of `first.weight`, 0 and 2 the other."""
    answers = ranks.run(4, spoiling.step, "hsdp", 4, guilty, "first.weight", math.nan, "zero")
    alike(answers, "skipped", "found_inf", "nonfinite", "counts", "total")
    torn = guilty == (1,)
    for answer in answers:
        assert answer.fault == ""
        assert answer.skipped is torn
        assert answer.found_inf == float(torn)
        assert answer.counts == {"first.weight": (1 + (len(guilty) == 4), 0)}
        assert (answer.changed == []) is torn
        assert answer.counters[2:] == (int(torn), int(torn))


def test_propagate_steps_with_nan_on_every_rank(ranks: Pool) -> None:
    answers = ranks.run(
        2, spoiling.clip, "fsdp", 2, 1, "first.weight", math.nan, "propagate", fused=False
    )
    for answer in answers:
        assert answer.skipped is False
        assert answer.found_inf == 1.0
        assert math.isnan(answer.total)
        assert all(bool(grad.isnan().all()) for grad in answer.grads.values())


@pytest.mark.parametrize("guilty", [0, 1, 3])
@pytest.mark.parametrize("name", ["plain", "line.rows", "both.blocks"])
def test_one_bad_copy_or_shard_is_seen_by_all_and_counted_once(
    ranks: Pool, guilty: int, name: str
) -> None:
    answers = ranks.run(
        *(4, spoiling.step, "several-meshes", 4, guilty, name, math.nan, "skip"), fused=False
    )
    alike(answers, "skipped", "found_inf", "nonfinite", "counts")
    for answer in answers:
        assert answer.skipped is True
        assert answer.changed == []
        assert answer.rewritten == []
        assert answer.counts == {name: (1, 0)}
        bad = [rank for rank, _, _, nan, _, _ in answer.by_rank if nan]
        assert bad == [guilty]


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("name", ["replicated", "replicated-rows", "scalar"])
@pytest.mark.parametrize("policy", ["skip", "error", "zero"])
def test_one_bad_replica_is_seen_by_all_and_counted_once(
    ranks: Pool, guilty: int, name: str, policy: str
) -> None:
    answers = ranks.run(4, spoiling.clip, "by-hand", 4, guilty, name, math.nan, policy)
    alike(answers, "fault", "skipped", "found_inf", "nonfinite", "counts", "total")
    for answer in answers:
        if policy == "error":
            assert f"{name!r} (1 NaN, 0 inf; on rank {guilty})" in answer.fault
            assert answer.rewritten == []
            continue
        assert answer.skipped is True  # under "zero" too: the others cannot know which element
        assert answer.found_inf == 1.0
        assert answer.counts == {name: (1, 0)}
        assert [rank for rank, _, _, nan, _, _ in answer.by_rank if nan] == [guilty]
        if policy == "skip":
            assert answer.rewritten == []


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize("name", ["a.rows", "b.columns", "b.replicated"])
def test_ranks_of_other_parts_of_a_mesh_decide_alike(ranks: Pool, name: str, guilty: int) -> None:
    """`a` is {0, 2} for ranks 0 and 2, {1, 3} for the others: they hold copies of the same."""
    answers = ranks.run(
        *(4, spoiling.step, "several-meshes", 4, guilty, name, math.nan, "skip"), fused=False
    )
    alike(answers, "skipped", "found_inf", "nonfinite", "counts", "by_rank")
    for answer in answers:
        assert answer.skipped is True
        assert answer.changed == []
        assert answer.counts == {name: (1, 0)}
