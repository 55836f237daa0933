"""What a step with process groups costs and leaves: collectives, bytes, dtypes, groups of one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fastclip import GradClipper
from tests.distributed import splits
from tests.distributed.ranks import Pool
from tests.distributed.splits import SPLITS, Part, Split

NUMBERS = 6  # in a row that is sent: the table's columns and flags
HEADER = 4  # rows beside those of the parameters


def collectives(name: str, policy: str) -> list[tuple[str, int]]:
    """Those of one step, with the bytes that this rank has sent."""
    split = SPLITS[name]
    own = splits.parameters(split)
    clipper = GradClipper(own.items(), nonfinite=policy, **splits.grouped(split))  # type: ignore[arg-type]
    splits.assign(split, own, splits.gradients(0))
    clipper.measure()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        clipper.clip_()
    return [
        (event.name, event.input_shapes[1][0] * event.input_shapes[1][1] * 8)
        for event in seen.events()
        if event.name.startswith("c10d::")
    ]


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("name", SPLITS)
def test_one_all_gather_of_a_few_rows_per_group(ranks: Pool, name: str, policy: str) -> None:
    split = SPLITS[name]
    answers = ranks.run(split.size, collectives, name, policy)
    largest = max(map(len, split.ranks))
    for sent in answers:
        assert [each for each, _ in sent] == ["c10d::_allgather_base_"] * len(split.groups)
        assert sent[0][1] == (largest + HEADER) * NUMBERS * 8
        assert sent == answers[0]


def dtypes(kind: str) -> Any:
    """Rank 1 alone has a parameter in float64."""
    rank = dist.get_rank()
    dtype = torch.float64 if rank == 1 else torch.bfloat16
    parameter = torch.zeros(3, dtype=dtype, requires_grad=True)
    parameter.grad = torch.full((3,), 2.0, dtype=dtype)
    clipper = GradClipper([(f"w{rank}", parameter)], 1.0, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=kind == "fused")
    stats = clipper.step(optimizer)
    return stats.total_norm, stats.norms.dtype, parameter.detach()


@pytest.mark.parametrize("kind", ["fused", "loop"])
def test_norms_are_as_wide_as_the_widest_gradient_anywhere(ranks: Pool, kind: str) -> None:
    for total, dtype, parameter in ranks.run(2, dtypes, kind):
        assert total.dtype == dtype == torch.float64
        assert total.item() == pytest.approx(24**0.5, rel=1e-12)
        wanted = torch.full((3,), -2 / (24**0.5 + 1e-6), dtype=torch.float64)
        rtol = 1e-12 if parameter.dtype == torch.float64 else 2**-8
        torch.testing.assert_close(parameter.double(), wanted, rtol=rtol, atol=0)


def alone(several: bool) -> Any:
    """Each rank in a group of its own, or in none."""
    group, _ = dist.new_subgroups(1)
    own = {name: value.clone().requires_grad_() for name, value in splits.gradients(7).items()}
    scale = 1.0 + dist.get_rank()
    for name, value in splits.gradients(0).items():
        own[name].grad = value * scale
    clipper = GradClipper(own.items(), 1.0, process_group=group if several else [])
    by_rank = clipper.measure().by_rank()
    return clipper.clip_().total_norm.item() / scale, [each.rank for each in by_rank]


@pytest.mark.parametrize("several", [True, False], ids=["group-of-one", "no-group"])
def test_a_group_of_one_rank_is_one_process(ranks: Pool, several: bool) -> None:
    whole = torch.cat([grad.flatten() for grad in splits.gradients(0).values()]).double()
    for rank, (total, by_rank) in enumerate(ranks.run(2, alone, several)):
        assert total == pytest.approx(whole.norm().item(), rel=1e-6)
        assert by_rank == [rank]


SHARED = Split([[Part("w0"), Part("w1")], [Part("w1"), Part("w0")]], [[[0, 1]]])


def other_order() -> Any:
    """Ranks that list the same names in another order, as shards."""
    own = splits.parameters(SHARED)
    splits.assign(SHARED, own, splits.gradients(0))
    stats = GradClipper(own.items(), 1.0, **splits.grouped(SHARED)).clip_()
    return stats.as_dict(), {name: parameter.grad for name, parameter in own.items()}


def test_rows_are_by_name_whatever_the_order(ranks: Pool) -> None:
    (first, ours), (second, theirs) = ranks.run(2, other_order)
    assert first == second
    assert first["names"] == ["w0", "w1"]
    assert first["numel"] == [96, 96]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
