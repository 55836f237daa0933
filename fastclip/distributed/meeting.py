"""What the members of process groups tell each other when a clipper is built."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip.distributed import combine
from fastclip.distributed.roster import Roster, Share, sources, unite
from fastclip.policy import SHOWN
from fastclip.ranks import said
from fastclip.rules import AGC, Rule
from fastclip.step import Settings

Counts = Callable[[str, Tensor], bool]


class Card(NamedTuple):
    """What a member tells the others of a group."""

    rank: int
    roster: Roster
    settings: str  # on which all have to agree
    dtype: torch.dtype  # of the norms of its gradients
    error: str | None = None  # why it cannot go on


class Meeting(NamedTuple):
    """What came of a group's exchange, for its steps."""

    group: dist.ProcessGroup
    places: int  # of the largest contributions of a member
    sources: list[int]  # see `roster.sources`; what there is none of is after all contributions
    checksum: int  # of the rows


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
                + (": take mesh.get_group()" if hasattr(group, "get_group") else "")
            )
    if len(set(map(id, groups))) < len(groups):
        raise ValueError(f"a group comes twice among the {len(groups)} of process_group")
    return groups


def held(tensors: Sequence[Tensor], names: Sequence[str] | None, counts: Counts | None) -> Roster:
    """The roster of this rank alone: its parameters that require a gradient or have one.

    Of a DTensor it knows what all ranks of the mesh hold; what they have combined is what counts.
    """
    if names is None and tensors:
        raise ValueError(
            "process_group combines parameters by their names, and these have none: pass the "
            "module, or (name, Tensor) pairs with the names that they have in the whole model"
        )
    me, seen = dist.get_rank(), set[int]()
    shares: dict[tuple[int, str], Share] = {}
    for name, tensor in zip(names or (), tensors, strict=True):
        if id(tensor) in seen or not (tensor.requires_grad or tensor.grad is not None):
            continue
        seen.add(id(tensor))
        if (me, name) in shares:
            raise ValueError(
                f"the name {name!r} comes more than once in parameters, and process_group combines "
                "them by their names"
            )
        share = Share(tensor.numel(), _counts(name, tensor, counts))
        mesh = _mesh(tensor)
        if mesh:
            shares[-1 - mesh[0], name] = share
        shares |= {(rank, name): Share(0, False) for rank in mesh}
        if me not in mesh:
            shares[me, name] = Share(0, False) if mesh else share
    ranks = dict.fromkeys([me, *(rank for rank, _ in shares)])
    return Roster(tuple(ranks), tuple(dict.fromkeys(name for _, name in shares)), shares)


def _mesh(tensor: Tensor) -> list[int]:
    """The ranks that a DTensor is spread over, in order; none if it is on one alone."""
    distributed = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor without it
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return []
    ranks: list[int] = sorted(tensor.device_mesh.mesh.flatten().tolist())
    return ranks if len(ranks) > 1 else []


def _counts(name: str, parameter: Tensor, counts: Counts | None) -> bool:
    answer: Any = True if counts is None else counts(name, parameter)
    if not isinstance(answer, bool):
        raise TypeError(f"counts must return True or False, got {answer!r:.80} for {name!r}")
    return answer


def meet(
    groups: Sequence[dist.ProcessGroup], mine: Card, error: Exception | None = None
) -> tuple[Roster, torch.dtype, list[Meeting]]:
    """Exchange cards over each group in turn: the rows of all, the dtype of norms, and what steps
    need of each group.

    A collective, in which a rank takes part to the end whatever is wrong, with it or with another
    rank. Raises its own `error`; else `RuntimeError` with that of another, or `ValueError` where
    settings differ or a name counts nowhere.
    """
    meetings = []
    for group in groups:
        mine = mine._replace(error=None if error is None else f"{type(error).__name__}: {error}")
        cards = _exchanged(group, mine)
        error = error or _disagreement(cards)
        members = [card.roster for card in cards]
        roster = unite(members)
        places = max(member.size for member in members)
        checksum = combine.checksum_of(roster.names)
        meetings.append(Meeting(group, places, sources(members, roster), checksum))
        wide = any(card.dtype == torch.float64 for card in cards)
        mine = mine._replace(roster=roster, dtype=torch.float64 if wide else torch.float32)
    error = error or _of_uncounted(mine.roster)
    if error is not None:
        raise error
    return mine.roster, mine.dtype, meetings


def decline(process_group: Any, error: Exception) -> NoReturn:
    """Take part in `meet` with nothing but the `error` that keeps this rank from it; raises it."""
    mine = Card(dist.get_rank(), Roster((dist.get_rank(),), (), {}), "", torch.float32)
    meet(groups_of(process_group), mine, error)
    raise error


def _exchanged(group: dist.ProcessGroup, card: Card) -> list[Card]:
    cards: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(cards, card, group=group)
    except RuntimeError as error:  # a rank has died, or never came
        ranks = said(dist.get_process_group_ranks(group))
        raise RuntimeError(
            f"exchanging the names of parameters between {ranks} failed: {error}"
        ) from error
    return cards


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
        f"({said(roster.holders(names[0]))} of the first): its gradient would be clipped by a norm "
        "that it is not part of"
    )


def described(settings: Settings) -> str:
    """What has to be the same on all ranks, as far as it can be compared."""
    rule: Any = settings.rule
    options = {f.name: getattr(rule, f.name) for f in fields(rule)} if is_dataclass(rule) else {}
    numbers = (f"{k}={v!r}" for k, v in options.items() if v is None or isinstance(v, (int, float)))
    return (
        f"{type(rule).__name__}({', '.join(numbers)}), norm_type={settings.p:g}, "
        f"nonfinite={settings.policy!r}"
    )


def refuse_rule(rule: Rule) -> None:
    if isinstance(rule, AGC):
        raise TypeError(
            "AGC looks at whole gradients and parameters, of which a rank of a process_group may "
            "hold a shard: take AdaGC, which clips each tensor by its norm, or another rule"
        )
