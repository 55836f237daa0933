"""Which process contributed what to a table that several of them made together."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastclip import table as tables

SHOWN = 5  # names that a RankStats prints


class Contributions(NamedTuple):
    """What each process held before the tables were combined, replicas and all.

    `tables` has rows without elements where a process takes no part in a gradient.
    """

    ranks: tuple[int, ...]  # global ranks, R of them
    tables: Tensor  # [R, n, 5], float64
    present: Tensor  # [n] bool: whether any process has a gradient for that row
    shares: Tensor | None = None  # [R, n]: 1 counts, -1 is a copy of what does; None: no copies

    def torn(self) -> Tensor:
        """Whether a row is not finite on some of the processes that hold copies of it and finite on
        others, 0-d bool: told by counts, since nobody knows another's elements."""
        if self.shares is None:
            return torch.zeros((), dtype=torch.bool, device=self.tables.device)
        bad = self.tables[:, :, tables.NAN : tables.INF + 1]
        own, copies = (self.shares > 0)[:, :, None], (self.shares < 0)[:, :, None]
        # as many of each process's share: a mesh has the same number of copies of all
        expected = (bad * own).sum(0) * copies.sum(0)
        return ((bad * copies).sum(0) * own.sum(0) != expected).any()

    def offenders(self) -> list[list[int]]:
        """Of each row, the ranks that hold an element which is NaN or infinite. Waits for the
        device."""
        found = self.tables[:, :, tables.NAN : tables.INF + 1].sum(2) > 0
        return [
            [rank for rank, bad in zip(self.ranks, row, strict=True) if bad]
            for row in found.T.tolist()
        ]


class RankStats(NamedTuple):
    """What one process held, in Python numbers, before it was combined with what others held.

    Attributes:
        rank: the global rank.
        norm: of all its gradients as one vector, its replicas of others' included.
        max_abs: the largest finite magnitude among them.
        nan: elements that are NaN.
        inf: elements that are infinite.
        nonfinite: the names of the gradients that have any of these.
    """

    rank: int
    norm: float
    max_abs: float
    nan: int
    inf: int
    nonfinite: list[str]

    def __repr__(self) -> str:
        """With the first names only, where there are many."""
        shown = ", ".join(map(repr, self.nonfinite[:SHOWN]))
        more = len(self.nonfinite) - SHOWN
        return (
            f"RankStats(rank={self.rank}, norm={self.norm:.6g}, max_abs={self.max_abs:.6g}, "
            f"nan={self.nan}, inf={self.inf}, nonfinite=[{shown}"
            + (f", and {more} more])" if more > 0 else "])")
        )


def rank_stats(
    rank: int, table: Tensor, names: Sequence[str], p: float, dtype: torch.dtype
) -> RankStats:
    """Of a process's own table, ``[n, 5]``, on the host. `dtype` is that of the norms."""
    row = tables.combine(table, p)
    counts = table[:, tables.NAN : tables.INF + 1].sum(1).tolist()
    return RankStats(
        rank,
        float(tables.total_norm(table, p).to(dtype)) if names else 0.0,
        float(row[tables.MAX_ABS].to(dtype)),
        int(row[tables.NAN]),
        int(row[tables.INF]),
        [name for name, count in zip(names, counts, strict=True) if count],
    )


def said(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0-3``, ``ranks 0, 2, 3``."""
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"


@contextmanager
def told(process_group: Any) -> Iterator[None]:
    """What goes wrong on this rank alone does not leave the others of a group waiting."""
    try:
        yield
    except Exception as error:
        if process_group is not None:
            from fastclip.distributed.meeting import decline

            decline(process_group, error)
        raise
