"""How DTensors are laid out, and which processes exchange what, seen by one process of four."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastclip
from fastclip.distributed.combine import COUNTED, OWNER, PRESENT
from fastclip.distributed.layouts import Layouts, world
from fastclip.distributed.lists import LISTS
from fastclip.distributed.plans import Gathering, planned
from fastclip.distributed.shards import Spread
from fastclip.gradients import Listed

ME = 2
BOTH = PRESENT + COUNTED


@pytest.fixture(autouse=True)
def rank_2_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=ME, world_size=4)
    yield
    dist.destroy_process_group()


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def square() -> DeviceMesh:
    """Rows of ranks 0, 1 and 2, 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))


def on(mesh: DeviceMesh, *placements: Placement, shape: tuple[int, ...] = (2, 3)) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)


def plan_of(*gradients: Tensor | None, alone: bool = False) -> list[Gathering]:
    spread = Listed(list(gradients), None, (), alone).spread
    assert spread is not None
    return planned(spread.layouts, spread.alone, world())


def seen(plan: list[Gathering]) -> list[tuple[tuple[int, ...], list[int], list[int]]]:
    return [(gathering.ranks, gathering.members, gathering.flags) for gathering in plan]


@pytest.mark.parametrize(
    ("placements", "counted"),
    [
        ((Shard(0), Shard(1)), True),
        ((Replicate(), Shard(0)), False),  # rank 2 is in row 1, column 0
        ((Shard(0), Replicate()), True),
        ((Replicate(), Replicate()), False),
        ((Partial(), Replicate()), True),  # its sum is measured in shards
        ((Replicate(), Partial("avg")), False),
    ],
    ids=str,
)
def test_who_counts(placements: tuple[Placement, ...], counted: bool) -> None:
    layout = Layouts().of(on(square(), *placements))
    assert layout is not None
    assert (layout.ranks, layout.counted) == ((0, 1, 2, 3), counted)


@pytest.mark.parametrize(
    ("placements", "shape", "reduced"),
    [
        ((Partial(), Replicate()), (2, 3), (Shard(0), Replicate())),
        ((Partial(), Shard(0)), (2, 3), (Shard(1), Shard(0))),
        ((Partial(), Shard(0)), (2,), (Replicate(), Shard(0))),
        ((Partial(), Partial()), (2, 3), (Shard(0), Shard(1))),
        ((Partial(), Partial()), (), (Replicate(), Replicate())),
    ],
    ids=str,
)
def test_how_partial_gradients_are_measured(
    placements: tuple[Placement, ...], shape: tuple[int, ...], reduced: tuple[Placement, ...]
) -> None:
    layout = Layouts().of(on(square(), *placements, shape=shape))
    assert layout is not None
    assert layout.reduced == reduced
    assert layout.divisor == 1


def test_averages_are_sums_that_are_divided() -> None:
    layout = Layouts().of(on(square(), Partial("avg"), Partial("avg")))
    assert layout is not None
    assert layout.divisor == 4


def test_two_meshes_of_the_same_processes_share_a_collective() -> None:
    plan = plan_of(on(line(), Shard(0)), on(square(), Replicate(), Shard(0)), torch.ones(2))
    whole = OWNER  # times one over rank 0, the lowest
    own = OWNER * (1 + ME)
    flags = [BOTH + whole, PRESENT + whole, BOTH + own]
    assert seen(plan) == [((0, 1, 2, 3), [0, 1, 2], flags)]


def test_part_of_a_mesh_rides_along() -> None:
    mesh = square()
    plan = plan_of(on(mesh["row"], Shard(0)), on(mesh["column"], Replicate()), on(line(), Shard(0)))
    row, column = OWNER * 1, OWNER * (1 + 2)  # the ranks 0, 2 and 2, 3
    assert seen(plan) == [
        ((0, 1, 2, 3), [0, 1, 2], [BOTH + row, BOTH + column, BOTH + OWNER]),
    ]


def test_alone_each_mesh_is_by_itself() -> None:
    mesh = square()
    plan = plan_of(on(mesh["row"], Shard(0)), torch.ones(2), on(line(), Shard(0)), alone=True)
    assert [(ranks, members) for ranks, members, _ in seen(plan)] == [
        ((0, 2), [0]),
        ((0, 1, 2, 3), [2]),
    ]


def test_a_mesh_that_this_process_is_not_in() -> None:
    there = on(DeviceMesh("cpu", [0, 1]), Shard(0), shape=(0, 3))
    assert plan_of(there) == []
    assert seen(plan_of(there, on(line(), Shard(0)))) == [
        ((0, 1, 2, 3), [0, 1], [PRESENT, BOTH + OWNER])
    ]


def test_parameters_without_gradients_have_a_place() -> None:
    parameters = [nn.Parameter(on(line(), Shard(0))) for _ in range(2)]
    frozen = nn.Parameter(on(line(), Shard(0)), requires_grad=False)
    tied = parameters[0]
    listed = Listed([None] * 4, ["a", "b", "frozen", "tied"], [*parameters, frozen, tied])
    assert listed.spread is not None
    assert listed.labels() == ("a", "b")
    assert [tuple(tensor.shape) for tensor in listed.grads] == [(0,), (0,)]
    assert (listed.spread.numel, listed.spread.present) == ([24, 24], [False, False])


def with_gradient(*placements: Placement, shape: tuple[int, ...] = (2, 3)) -> nn.Parameter:
    parameter = nn.Parameter(on(line(), *placements, shape=shape))
    parameter.grad = on(line(), *placements, shape=shape)
    return parameter


def spread_of(parameters: list[nn.Parameter], *names: str) -> Spread:
    listed = Listed([each.grad for each in parameters], list(names) or None, parameters)
    assert listed.spread is not None
    return listed.spread


def test_what_is_known_of_a_list_is_kept() -> None:
    parameters = [with_gradient(Shard(0)), with_gradient(Replicate())]
    first = spread_of(parameters)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
    assert spread_of(parameters).plan is first.plan
    assert spread_of([with_gradient(Shard(0)), with_gradient(Replicate())]).plan is first.plan
    assert spread_of(parameters, "a", "b").checksum != first.checksum
    listed = Listed([each.grad for each in parameters], None, parameters, alone=True)
    assert listed.spread is not None
    assert listed.spread.alone
    assert spread_of(parameters).plan is first.plan


def test_the_oldest_lists_are_forgotten() -> None:
    parameters = [with_gradient(Shard(0))]
    first = spread_of(parameters)
    for number in range(LISTS - 1):
        spread_of(parameters, str(number + 1))
    assert spread_of(parameters).plan is first.plan
    for number in range(LISTS):
        spread_of(parameters, f"other {number}")
    assert spread_of(parameters).plan is not first.plan


def replaced(parameters: list[nn.Parameter]) -> None:
    parameters[1] = with_gradient(Shard(0), shape=(5, 3))


def resharded(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = on(line(), Replicate(), shape=(8, 3))


def plain(parameters: list[nn.Parameter]) -> None:
    parameters[1] = nn.Parameter(torch.zeros(7))
    parameters[1].grad = torch.ones(7)


def absent(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = None


def frozen(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = None
    parameters[1].requires_grad = False


def partial(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = on(line(), Partial(), shape=(8, 3))


@pytest.mark.parametrize(
    ("change", "numel", "flags", "present"),
    [
        (replaced, [24, 60], [BOTH, BOTH], [True, True]),
        (resharded, [24, 24], [BOTH, PRESENT], [True, True]),
        (plain, [24, 7], [BOTH, BOTH + OWNER * ME], [True, True]),
        (absent, [24, 24], [BOTH, BOTH], [True, False]),
        (frozen, [24], [BOTH], [True]),
        (partial, [24, 24], [BOTH, BOTH], [True, True]),
    ],
)
def test_what_is_known_is_not_used_for_other_gradients(
    change: Callable[[list[nn.Parameter]], None],
    numel: list[int],
    flags: list[int],
    present: list[bool],
) -> None:
    parameters = [with_gradient(Shard(0)), with_gradient(Shard(0))]
    before = spread_of(parameters)
    change(parameters)
    after = spread_of(parameters)
    assert (after.numel, after.present) == (numel, present)
    assert seen(planned(after.layouts, False, world())) == [
        ((0, 1, 2, 3), [*range(len(numel))], [OWNER + f for f in flags])
    ]
    assert sorted(after.partial) == ([1] if change is partial else [])
    assert (before.numel, before.present) == ([24, 24], [True, True])


def test_nothing_is_kept_of_groups_that_are_gone() -> None:
    ranks = (0, ME)
    first, again = (dist.new_group(ranks) for _ in range(2))
    meshes = [DeviceMesh.from_group(group, "cpu") for group in (first, again)]
    assert meshes[0] == meshes[1]
    (gathering,) = plan_of(on(meshes[0], Shard(0)))
    assert gathering.group is first
    dist.destroy_process_group(first)
    (gathering,) = plan_of(on(meshes[1], Shard(0)))
    assert gathering.group is again
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=ME, world_size=3)
    assert seen(plan_of(on(init_device_mesh("cpu", (3,)), Shard(0)))) == [
        ((0, 1, 2), [0], [BOTH + OWNER])
    ]


def test_meshes_of_one_process_are_ordinary() -> None:
    own = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [ME]), [Partial("max")])
    assert Listed([own], None).spread is None
    assert fastclip.get_total_norm([own]) == torch.ones(2).norm()


@pytest.mark.parametrize("kind", ["max", "product"])
@pytest.mark.parametrize("call", [fastclip.get_total_norm, fastclip.grad_stats], ids=["norm", "st"])
def test_partial_that_is_not_linear(call: Callable[[object], object], kind: str) -> None:
    parameter = nn.Parameter(on(line(), Replicate()))
    parameter.grad = on(line(), Partial(kind))
    tensors = [("w", parameter.grad if call is fastclip.get_total_norm else parameter)]
    with pytest.raises(TypeError, match=rf"^gradient 'w' is a DTensor .*{kind}"):
        call(tensors)


def test_partial_elements_are_not_clamped() -> None:
    parameter = nn.Parameter(on(line(), Replicate()))
    parameter.grad = on(line(), Partial())
    with pytest.raises(TypeError, match=r"^the gradient at position 0 is a DTensor .* clamped"):
        fastclip.clip_grad_value_([parameter], 0.5)
    assert parameter.grad.to_local().equal(torch.ones(2, 3))


def test_equal_meshes_of_other_groups_have_each_its_own() -> None:
    ranks = (0, ME)
    groups = [dist.new_group(ranks) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    assert meshes[0] == meshes[1]
    plans = [plan_of(on(mesh, Shard(0))) for mesh in meshes]
    assert [gathering.group for (gathering,) in plans] == groups
