"""Gradients that are spread over process groups by hand: pipeline stages, shards, experts, copies.

At construction the members of each group tell each other the names of their parameters, from which
each works out the same rows. At every step one `all_gather` per group moves what each rank has
measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fastclip.distributed.roster import Roster, Share, sources, unite

SHOWN = 10  # names that an error lists

Counts = Callable[[str, Tensor], bool]
ProcessGroups = dist.ProcessGroup | Sequence[dist.ProcessGroup]


class Card(NamedTuple):
    """What a member tells the others of a group."""

    rank: int
    roster: Roster
    settings: str  # on which all have to agree
    error: str | None  # why it cannot go on


class Meeting(NamedTuple):
    """What came of a group's exchange, for its steps."""

    group: dist.ProcessGroup
    places: int  # of the largest contributions of a member
    sources: list[int]  # see `roster.sources`


def groups_of(process_group: Any) -> list[dist.ProcessGroup]:
    """One group or several, as a list."""
    if isinstance(process_group, Sequence) and not isinstance(process_group, str):
        groups = [*process_group]
    else:
        groups = [process_group]
    for group in groups:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "process_group holds a group that this process is not a member of: "
                "torch.distributed.new_group gives the group itself to its members only"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup or a sequence of them, "
                f"got {type(group).__name__}"
            )
    if len(set(map(id, groups))) < len(groups):
        raise ValueError(f"a group comes twice among the {len(groups)} of process_group")
    return groups


def held(tensors: Sequence[Tensor], names: Sequence[str] | None, counts: Counts | None) -> Roster:
    """The roster of this rank alone: its parameters that require a gradient or have one."""
    if names is None and tensors:
        raise ValueError(
            "process_group combines parameters by their names, and these have none: pass the "
            "module, or (name, Tensor) pairs with the names that they have in the whole model"
        )
    rank = dist.get_rank()
    shares: dict[tuple[int, str], Share] = {}
    for name, tensor in zip(names or (), tensors, strict=True):
        if not takes_part(tensor):
            continue
        if (rank, name) in shares:
            raise ValueError(
                f"the name {name!r} comes more than once in parameters, and process_group combines "
                "them by their names"
            )
        shares[rank, name] = Share(tensor.numel(), _counts(name, tensor, counts))
    return Roster((rank,), tuple(name for _, name in shares), shares)


def takes_part(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _counts(name: str, parameter: Tensor, counts: Counts | None) -> bool:
    answer: Any = True if counts is None else counts(name, parameter)
    if not isinstance(answer, bool):
        raise TypeError(f"counts must return True or False, got {answer!r:.80} for {name!r}")
    return answer


def meet(
    groups: Sequence[dist.ProcessGroup],
    mine: Roster,
    settings: str,
    error: Exception | None = None,
) -> tuple[Roster, list[Meeting]]:
    """Exchange rosters over each group in turn: the rows of all, and what steps need of each group.

    A collective, in which a rank takes part to the end whatever is wrong, with it or with another
    rank. Raises its own `error`; else `RuntimeError` with that of another, or `ValueError` where
    settings differ or a name counts nowhere.
    """
    meetings = []
    for group in groups:
        cards = _exchanged(
            group, Card(dist.get_rank(), mine, settings, None if error is None else _told(error))
        )
        error = error or _disagreement(cards)
        members = [card.roster for card in cards]
        mine = unite(members)
        places = max(member.size for member in members)
        meetings.append(Meeting(group, places, sources(members, mine)))
    error = error or _of_uncounted(mine)
    if error is not None:
        raise error
    return mine, meetings


def _exchanged(group: dist.ProcessGroup, card: Card) -> list[Card]:
    cards: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(cards, card, group=group)
    except RuntimeError as error:  # a rank has died, or never came
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise RuntimeError(
            f"exchanging the names of parameters between ranks {ranks} failed: {error}"
        ) from error
    return cards


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _disagreement(cards: Sequence[Card]) -> Exception | None:
    for card in cards:
        if card.error is not None:
            return RuntimeError(f"rank {card.rank} could not build its GradClipper: {card.error}")
    first = cards[0]
    for card in cards:
        if card.settings != first.settings:
            return ValueError(
                "the GradClippers of a process group must be alike: that of rank "
                f"{first.rank} has {first.settings}, that of rank {card.rank} {card.settings}"
            )
    return None


def _of_uncounted(roster: Roster) -> Exception | None:
    names = roster.uncounted()
    if not names:
        return None
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(map(repr, names[:SHOWN]))
    return ValueError(
        f"counts is False on every rank that holds {shown}{more} "
        f"(ranks {', '.join(map(str, roster.holders(names[0])))} of the first), so its gradient "
        "would be clipped by a norm that it is not part of"
    )
