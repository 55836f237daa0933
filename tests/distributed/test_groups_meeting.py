"""What ranks tell each other when clippers with process groups are built."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastclip.distributed import meeting
from fastclip.distributed.roster import Roster
from tests.distributed.ranks import Pool

Names = tuple[tuple[str, ...], ...]


def card(roster: Roster | None = None, settings: str = "alike") -> meeting.Card:
    rank = dist.get_rank()
    own = roster or Roster((rank,), (), {})
    return meeting.Card(rank, own, settings, torch.float64 if rank == 1 else torch.float32)


def rosters(layout: Names, groupings: list[list[list[int]]]) -> Any:
    """Each rank holds tensors of these names, "-name" for a copy; the roster after all meeting."""
    rank = dist.get_rank()
    names = [name.strip("-") for name in layout[rank]]
    tensors = [torch.ones(rank + 1, requires_grad=True) for _ in names]
    made = [dist.new_subgroups_by_enumeration(grouping)[0] for grouping in groupings]
    mine = meeting.held(tensors, names, lambda name, _: f"-{name}" not in layout[rank])
    united, _, met = meeting.meet(made, card(mine))
    return united, [each.places for each in met]


def raised(kind: str) -> str:
    """What each rank raises where rank 1 has something wrong."""
    rank, world = dist.get_rank(), meeting.groups_of(dist.group.WORLD)
    settings, error, mine = "alike", None, None
    if kind == "settings":
        settings = f"those of {rank}"
    elif kind == "counts":
        mine = meeting.held([torch.ones(2, requires_grad=True)], ["x"], lambda *_: False)
    elif rank == 1:
        error = LookupError("what rank 1 lacks")
    try:
        meeting.meet(world * 2, card(mine, settings), error)  # in one group after the other
    except Exception as met:
        return f"{type(met).__name__}: {met}"
    return "nothing"


def left_alone() -> str:
    """Rank 1 dies before it has told its names."""
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        meeting.meet(meeting.groups_of(dist.group.WORLD), card())
    return str(error.value)


def test_pipeline_of_tensor_parallel_stages(ranks: Pool) -> None:
    layout = (("embed", "w0"), ("embed", "w0"), ("w1", "-embed"), ("w1", "-embed"))
    groupings = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    answers = ranks.run(4, rosters, layout, groupings)
    for united, places in answers:
        assert united.ranks == (0, 1, 2, 3)
        assert united.names == ("embed", "w0", "w1")
        assert united.numel() == (3, 3, 7)
        assert united.weights() == [[True, True, False]] * 2 + [[False, False, True]] * 2
        assert places == [2, 4]


@pytest.mark.parametrize(
    ("kind", "others", "own"),
    [
        (
            "error",
            "RuntimeError: rank 1 could not build its GradClipper: LookupError: what rank 1 lacks",
            "LookupError: what rank 1 lacks",
        ),
        (
            "settings",
            "ValueError: the GradClippers of a process group must be alike: "
            "that of rank 0 has those of 0, that of rank 1 those of 1",
            None,
        ),
        (
            "counts",
            "ValueError: counts is False on every rank that holds 'x' (ranks 0-2 of the first): "
            "its gradient would be clipped by a norm that it is not part of",
            None,
        ),
    ],
)
def test_all_raise_what_is_wrong_on_one(
    ranks: Pool, kind: str, others: str, own: str | None
) -> None:
    assert ranks.run(3, raised, kind) == [others, own or others, others]


def test_a_rank_that_dies_is_an_error_on_the_others(mortal_ranks: Pool) -> None:
    answers = mortal_ranks.run(3, left_alone, timeout=5, dying=[1], seconds=30)
    for message in (answers[0], answers[2]):
        assert message.startswith("exchanging the names of parameters between ranks 0-2 failed: ")


@pytest.mark.parametrize(
    ("names", "answer", "error"),
    [
        (None, True, "process_group combines parameters by their names, and these have none"),
        (["a", "a"], True, "the name 'a' comes more than once in parameters"),
        (["a", "b"], 1, "counts must return True or False, got 1 for 'a'"),
        (["a", "b"], None, "counts must return True or False, got None for 'a'"),
        (["a", "b"], torch.ones(()), r"counts must return True or False, got tensor\(1.\) for 'a'"),
    ],
)
def test_what_cannot_be_exchanged(
    monkeypatch: pytest.MonkeyPatch, names: list[str] | None, answer: Any, error: str
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    tensors = [torch.ones(1, requires_grad=True) for _ in range(2)]
    with pytest.raises((TypeError, ValueError), match=error):
        meeting.held(tensors, names, lambda name, parameter: answer)


def test_counts_is_asked_once_for_what_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    asked: list[tuple[str, Tensor]] = []

    def counts(name: str, parameter: Tensor) -> bool:
        asked.append((name, parameter))
        return name != "b"

    tensors = [torch.ones(2, requires_grad=name != "frozen") for name in ("a", "frozen", "b")]
    roster = meeting.held(tensors, ["a", "frozen", "b"], counts)
    assert [name for name, _ in asked] == ["a", "b"]
    assert asked[0][1] is tensors[0]
    assert asked[1][1] is tensors[2]
    assert (roster.ranks, roster.names, roster.numel()) == ((5,), ("a", "b"), (2, 0))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (None, "process_group must be a torch.distributed.ProcessGroup .* got NoneType"),
        ("world", "got str"),
        ([0], "got int"),
        (-100, "a group that this process is not a member of"),
        ([-100], "a group that this process is not a member of"),
    ],
    ids=repr,
)
def test_what_is_no_process_group(wrong: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        meeting.groups_of(wrong)
