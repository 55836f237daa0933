"""Tables of several processes into one: pack, gather, combine.

A process packs its table into ``[HEADER + n, 6]``, float64, which one `all_gather` brings to all:
every process then combines the same numbers in the same order, and has the same bits.

=============  ===================================================================================
rows 0 to 2    of the sixth column alone: FAILED, 0 or one over the global rank of a process that
               could not measure; CHECKSUM of what the rows are, and AGREED, one of the options of
               this call: both have to be the same on all
rows 3 to n+3  a row of the table, and its flags: PRESENT, there is a gradient; COUNTED, no other
               process of its set counts these elements; and OWNER times one over the lowest rank
               of that set, where several sets may hold the same tensor: the lowest counts
=============  ===================================================================================

The shape must not depend on data, nor on whether a process has gradients: one that has none sends
rows without elements, and one that cannot measure sends them with its rank in FAILED. So nobody is
left waiting.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import table as tables
from fastclip.ranks import Contributions as Contributions
from fastclip.ranks import RankStats as RankStats
from fastclip.ranks import said as said

HEADER = 3
FAILED, CHECKSUM, AGREED = range(HEADER)
PRESENT, COUNTED, OWNER = 1, 2, 4  # what the flags are made of

# The second is the name before torch 2.13, where it is deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


OPTIONS = (
    "all ranks need the same options (order of the norm, threshold, rule, policy, scaler), and "
    "clippers that have taken the same number of steps and loaded the same state"
)


class FailedElsewhere(RuntimeError):
    """Another process, of the global rank `rank`, could not measure its gradients."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} could not measure its gradients, and raises the error itself. No "
            "gradient has been changed"
        )
        self.rank = rank


class Weights(NamedTuple):
    """Which of the tables count, by their flags."""

    flags: Tensor  # [R, n]
    counted: Tensor  # [R, n] bool
    present: Tensor  # [n] bool: whether any process has a gradient
    all_count: bool  # as far as that is known without a wait
    shares: Tensor | None  # as in `Contributions`


class Gathered(NamedTuple):
    """What R processes have packed, in the order of their ranks in the group."""

    ranks: tuple[int, ...]  # global
    tables: Tensor  # [R, n, 5]
    flags: Tensor  # [R, n]
    header: Tensor  # [R, HEADER]

    @property
    def counted(self) -> Tensor:
        """``[R, n]`` bool."""
        owners = self.flags.div(OWNER, rounding_mode="floor")
        first = torch.where(owners > 0, owners, math.inf).amin(0)
        return (self.flags.remainder(OWNER) >= COUNTED) & ((owners == 0) | (owners == first))

    def weights(self) -> Weights:
        counted = self.counted
        present = (self.flags.remainder(COUNTED) == PRESENT).any(0)
        all_count = counted.device.type == "cpu" and bool(counted.all())
        shares = None
        if not all_count:  # one that is outside the tensor's mesh has no copy, and no OWNER
            shares = counted.int() - (~counted & (self.flags >= OWNER)).int()
        return Weights(self.flags.clone(), counted, present, all_count, shares)

    def known_failed(self) -> list[int]:
        """The global ranks of processes that could not measure; none where to ask would wait."""
        if self.header.device.type != "cpu":
            return []
        return [int(failed) - 1 for failed in self.header[:, FAILED].tolist() if failed]

    def refuse_failed(self) -> None:
        """Raise `FailedElsewhere` if a process could not measure. Waits for the device."""
        for failed in self.header[:, FAILED].tolist():
            if failed:
                raise FailedElsewhere(int(failed) - 1)

    def refuse_different(self, what: str) -> None:
        """Raise `RuntimeError`, which starts with `what`, if rows mean something else on another
        process, or if options differ. Waits for the device."""
        for said_first, column in ((what, CHECKSUM), (OPTIONS, AGREED)):
            checksums = self.header[:, column].tolist()
            for rank, checksum in zip(self.ranks, checksums, strict=True):
                if checksum != checksums[0]:
                    raise RuntimeError(
                        f"{said_first}, but rank {rank} has others than rank {self.ranks[0]}. No "
                        "gradient has been changed"
                    )

    def refuse_unreduced(self, labels: Sequence[str]) -> None:
        """Raise `RuntimeError` if some processes wait to reduce a row that others cannot. `labels`
        are what errors call the rows. Waits for the device."""
        waiting = self.flags < 0
        if not waiting.any():
            return
        for row in (waiting.any(0) & ~waiting.all(0)).nonzero()[:, 0].tolist():
            others = [
                rank for rank, waits in zip(self.ranks, waiting[:, row], strict=True) if not waits
            ]
            raise RuntimeError(
                f"{labels[row]} is a partial DTensor, to be summed over {said(self.ranks)}, but "
                f"{said(others)} have no summand: give them one of zeros, or reduce it before. No "
                "gradient has been changed"
            )

    def settle(self, what: str, labels: Sequence[str] = ()) -> None:
        """All three. Where reading the header would wait for the device, the tables become not
        finite, so that no process clips or steps; `raise_overdue` raises the error in the next
        call.
        """
        if self.header.device.type == "cpu":
            self.refuse_failed()
            self.refuse_different(what)
            self.refuse_unreduced(labels)
            return
        different = (self.header != self.header[0])[:, CHECKSUM:].any(1)
        wrong = (self.header[:, FAILED] > 0) | different
        waiting = self.flags < 0
        unknown = wrong.any() | (waiting.any(0) & ~waiting.all(0)).any()
        self.tables[:, :, tables.NAN] += unknown.to(torch.float64)
        # a norm clips where nobody looks at the counts
        self.tables[:, :, tables.POWER].masked_fill_(unknown, math.nan)
        _overdue.append(_Overdue.of(self, what, labels))


class _Overdue(NamedTuple):
    """A header on its way to the host."""

    gathered: Gathered
    arrived: torch.Event
    what: str
    labels: Sequence[str] = ()

    @classmethod
    def of(cls, gathered: Gathered, what: str, labels: Sequence[str]) -> "_Overdue":
        there = gathered.header
        header = torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=True)
        header.copy_(there, non_blocking=True)
        arrived = torch.Event(there.device)
        arrived.record()
        return cls(gathered._replace(header=header), arrived, what, labels)


_overdue: list[_Overdue] = []


def raise_overdue() -> None:
    """Raise what the headers of the last call say, on other devices than the CPU."""
    headers = _overdue.copy()
    _overdue.clear()  # at once: what one process raises in the next call, the others would not
    for gathered, arrived, what, labels in headers:
        arrived.synchronize()
        gathered.settle(what, labels)


def pack(table: Tensor, flags: Sequence[int], checksum: int, failed: int | None = None) -> Tensor:
    """What a process sends, ``[HEADER + n, 6]``, on the table's device.

    `checksum` is a whole number under 2**53; `failed` is the global rank of a process that could
    not measure, this one or another that this one has heard of.
    """
    side = torch.tensor(
        [0 if failed is None else failed + 1, checksum, 0, *flags],
        dtype=torch.float64,
        device="cpu",
    )
    if table.device.type == "cuda":
        side = side.pin_memory()  # else the copy waits for the device
    packed = table.new_zeros(HEADER + len(table), tables.COLUMNS + 1)
    packed[:, tables.COLUMNS] = side.to(table.device, non_blocking=True)
    packed[HEADER:, : tables.COLUMNS] = table
    return packed


def gather(packed: Tensor, group: dist.ProcessGroup) -> Gathered:
    """Exchange what the processes of `group` have packed, in one collective, on packed's device.

    Raises `RuntimeError` that names the ranks if that fails, as when one has died.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    sent = packed.to(_served(group, packed.device))
    received = sent.new_empty(len(ranks) * len(sent), sent.shape[1])
    with naming(ranks):
        _all_gather(received, sent, group=group)
    every = received.view(len(ranks), *sent.shape).to(packed.device)
    rows = every[:, HEADER:]
    return Gathered(
        ranks,
        rows[:, :, : tables.COLUMNS],
        rows[:, :, tables.COLUMNS],
        every[:, :HEADER, tables.COLUMNS],
    )


def any_of(flag: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whether `flag`, 0-d bool, holds on any process of `group`. Errors as in `gather`."""
    return _reduced(flag.to(torch.float32), dist.ReduceOp.MAX, group) > 0


def sum_of(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what the processes of `group` have. Errors as in `gather`."""
    return _reduced(x, dist.ReduceOp.SUM, group)


def least_of(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The smallest of what the processes of `group` have, which is no infinity below 0; NaN where
    one has NaN. Errors as in `gather`."""
    # backends differ in what they make of NaN
    least = _reduced(x.masked_fill(x.isnan(), -math.inf), dist.ReduceOp.MIN, group)
    return least.masked_fill(least == -math.inf, math.nan)


def _reduced(x: Tensor, by: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    reduced = x.to(_served(group, x.device), copy=True)
    with naming(dist.get_process_group_ranks(group)):
        dist.all_reduce(reduced, by, group=group)
    return reduced.to(x.device)


def told(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """What each process of `group` tells of itself, whole numbers under 2**53. Waits."""
    ranks = dist.get_process_group_ranks(group)
    own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    own = own.to(_served(group, own.device))
    received = own.new_empty(len(ranks) * len(own))
    with naming(ranks):
        _all_gather(received, own, group=group)
    return [list(map(int, row)) for row in received.view(len(ranks), -1).tolist()]


@contextmanager
def naming(ranks: Sequence[int]) -> Iterator[None]:
    """Errors of a collective name its processes."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"combining the gradient statistics of {said(ranks)} failed: {error}. Each of them has "
            "to make the same call; one may have died, or raised an error of its own"
        ) from error


def combine(every: Tensor, counted: Tensor, p: float, all_count: bool = False) -> Tensor:
    """The table, ``[n, 5]``, of all elements that the tables ``[R, n, 5]`` of R processes describe.

    Where `counted`, ``[R, n]`` bool, is false, a process holds a replica of elements that another
    counts. Of it matters only what is not finite, which is seen by all and counted once: a POWER
    that is NaN or infinite, and counts of NAN and INF beyond those that are counted. `all_count`
    tells that there is none of these.
    """
    if all_count:
        table = every.sum(0)
        table[:, tables.MAX_ABS] = every[:, :, tables.MAX_ABS].amax(0)
        if math.isinf(p):
            powers = every[:, :, tables.POWER]
            table[:, tables.POWER] = powers.amax(0) if p > 0 else powers.amin(0)
        return table
    powers, maxima = every[:, :, tables.POWER], every[:, :, tables.MAX_ABS]
    if p == -math.inf:
        power = torch.where(counted | powers.isnan(), powers, math.inf).amin(0)
    else:
        powers = torch.where(counted | ~powers.isfinite(), powers, 0.0)
        power = powers.amax(0) if p == math.inf else powers.sum(0)
    counts = every[:, :, tables.NAN :]
    own = torch.where(counted[:, :, None], counts, 0.0).sum(0)
    bad = torch.where(counted[:, :, None], 0.0, counts[:, :, : tables.ZERO - tables.NAN]).amax(0)
    columns = [
        power[:, None],
        torch.where(counted, maxima, 0.0).amax(0)[:, None],
        torch.maximum(own[:, : bad.shape[1]], bad),
        own[:, bad.shape[1] :],
    ]
    return torch.cat(columns, 1)


def checksum_of(labels: Iterable[str]) -> int:
    """Of names in their order, the same in every process."""
    return zlib.crc32("\n".join(labels).encode())


def agreed(options: Iterable[object]) -> int:
    """A checksum of options, the same in every process. Of a Tensor its one value, but on devices,
    where to look at it would wait."""
    return checksum_of(map(_option, options))


def _option(option: object) -> str:
    if not isinstance(option, Tensor):
        return str(option)
    return str(float(option)) if option.device.type == "cpu" else "a Tensor"


def _served(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where to put what is sent: `device`, or one that the group's backend can send from, as for
    gradients kept on the CPU beside NCCL."""
    kinds = [kind.type for kind in group._device_types]
    if device.type in kinds or not kinds:
        return device
    if kinds[0] == "cpu":
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
