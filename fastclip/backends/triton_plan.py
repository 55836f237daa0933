"""Which block of the grid works on what: the tables that the kernels read, and when they change.

What follows from sizes, dtypes and layouts alone is built once and kept, a `Plan` for each list and
stream. Per step the addresses are compared, and sent to the device if they changed: from pinned
memory, in stream order, and from a fresh piece each time (torch's pinned allocator does not hand
a piece out again before the copy from it has run), so no table is overwritten that is still read.

A plan belongs to one stream: two streams never share its buffers. During CUDA-graph capture a plan
is made for that graph alone, and its upload becomes part of the graph.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

# Columns of an entry (a gradient with elements) and of a block (one program of the grid).
NUMEL, FIRST_CHUNK, LAST_CHUNK, ROW, FIRST_BLOCK, N_BLOCKS, LAYOUT = range(7)
ENTRY_COLUMNS = 7
BLOCK_COLUMNS = 3  # its first chunk, the entry of that, the entry of its last chunk
MAX_DIMS = 8
LAYOUT_COLUMNS = 1 + 2 * MAX_DIMS  # number of dimensions; size and stride of each, innermost first
DENSE = (1, 1 << 62, 1)  # layout 0: one dimension of stride 1, longer than any tensor

# Counters: tickets of the whole grid, generation of its barrier, then one for each entry.
TICKET, GENERATION, ENTRY_COUNTERS = range(3)

LANES = 256  # threads of a block
LOADS = 4  # of 16 bytes, that a thread issues before it uses the first
CHUNK_BYTES = 4 * LOADS * LANES * 16
# What looking up a chunk may cost beside reading it: 2 us, in which a block of 528 reads 16 KiB of
# the 4.3 TB/s that an H200 can. A guess from latencies; not measured.
CHUNK_OVERHEAD = 16384

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Plans: more than the lists of one step, which are the gradients and, under an `ActivationWatch`,
# one for each size of an activation. A plan takes 34 KB of an H200 for one large tensor; for 2,000
# gradients it takes 250 KB there and 200 KB of the host.
CACHED = 256
HOST = "cpu"  # wherever tensors are made by default

Layout = tuple[tuple[int, int], ...]  # (size, stride), innermost first; () for dense memory

_dtype = attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class Grid:
    """What the device offers: how many blocks are resident at once, and up to how many bytes a list
    is served by one cooperative launch of how many blocks (0: never)."""

    blocks: int
    cooperative_bytes: int = 0
    cooperative_blocks: int = 0


@dataclass(slots=True)
class Group:
    """The gradients of one dtype: a launch of each kernel. The tensors are parts of one upload."""

    dtype: torch.dtype
    blocks: int
    addresses: Tensor
    entries: Tensor
    grid: Tensor


@dataclass(slots=True)
class Scratch:
    """What kernels leave for blocks and kernels after them."""

    slots: Tensor
    counters: Tensor  # 0 between launches, but for the generation
    factor: Tensor  # what the gradients are to be multiplied by


@dataclass(slots=True)
class Plan:
    """Device tables of one list of gradients on one stream."""

    device: torch.device
    n: int
    wide: bool  # a float64 gradient among them
    cooperative: bool
    groups: list[Group]
    order: list[int]  # rows with elements, by group: whose addresses are sent
    in_order: bool  # these are all rows, in order
    sizes: tuple[int, ...]  # bytes of an element of each of these
    addresses: Tensor  # of these, on the device
    sent: list[int]  # the addresses of all rows that the device has
    layouts: Tensor
    empties: Tensor
    scratch: Scratch


class Plans:
    """The plans in use, the one used longest ago leaving first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # from looking up a plan to the last launch with it
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._spare: list[Tensor] = []  # pinned; see _pinned
        self._captured: list[Tensor] = []  # pinned memory that CUDA graphs copy from: for good

    def find(self, grads: Sequence[Tensor], grid: Grid) -> Plan | None:
        """The plan with these gradients' addresses, or None if a gradient is not served as it is.

        Hold `lock`, and make the gradients' device the current one.
        """
        try:
            addresses = list(map(Tensor.data_ptr, grads))
        except RuntimeError:  # no memory of its own: sparse, or on no device
            return None
        device = grads[0].device
        key = (_stream(device), grid, *_facts(grads))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._new(grads, addresses, key, grid, capturing=True)
        if key in self._plans:
            self._plans.move_to_end(key)
            known = self._plans[key]
            # An address is that of one device and never another's, so what has not moved is there.
            if known.sent == addresses:
                return known
            return self._moved(known, grads, addresses)
        plan = self._new(grads, addresses, key, grid, capturing=False)
        if plan is None:
            return None  # not kept: what was refused for is not all in the key
        self._plans[key] = plan
        if len(self._plans) > CACHED:
            self._plans.popitem(last=False)
        return plan

    def _moved(self, plan: Plan, grads: Sequence[Tensor], addresses: list[int]) -> Plan | None:
        ordered = _ordered(plan, addresses)
        if not _on_one_device(grads) or not _usable(plan, ordered):
            return None
        _upload(plan.addresses, ordered, None)
        plan.sent = addresses
        return plan

    def _new(
        self,
        grads: Sequence[Tensor],
        addresses: list[int],
        key: tuple[object, ...],
        grid: Grid,
        capturing: bool,
    ) -> Plan | None:
        if not all(map(_served, grads)) or not _on_one_device(grads):
            return None
        plan, tables, work = build(grads, grid, cooperative=not capturing)
        ordered = _ordered(plan, addresses)
        if not _usable(plan, ordered):
            return None
        tables[: len(ordered)] = ordered
        _upload(work, tables, self._pinned(len(tables), capturing))
        plan.sent = addresses
        return plan

    def _pinned(self, size: int, capturing: bool) -> Tensor | None:
        """A piece of pinned memory made before the capture began, if there is one that is big
        enough: allocating one may be forbidden during it. It is the graph's from then on."""
        if capturing:
            fitting = [piece for piece in self._spare if piece.numel() >= size]
            piece = min(fitting, key=Tensor.numel) if fitting else _new_pinned(size)
            self._spare = [spare for spare in self._spare if spare is not piece]
            self._captured.append(piece)
            return piece[:size]
        if torch.cuda.is_available() and not any(s.numel() >= size for s in self._spare):
            self._spare = [*self._spare[-3:], _new_pinned(2 * size)]
        return None


def layout(x: Tensor) -> Layout | None:
    """The dimensions of more than one element, neighbours merged, or () if they fill their memory;
    None for overlapping memory, a stride of 0 and more dimensions than the kernels take."""
    if x.is_contiguous():
        return ()
    dims: list[tuple[int, int]] = []
    extent = 1  # of the dimensions so far
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return None
        extent += (size - 1) * stride
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride))
    if not dims or (len(dims) == 1 and dims[0][1] == 1):
        return ()
    return tuple(dims) if len(dims) <= MAX_DIMS else None


def in_memory(number: Tensor) -> Tensor:
    """A tensor whose memory is what it shows: a lazily negated view is not."""
    number = number.detach()
    return number.resolve_neg() if number.is_neg() else number


def served(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return _served(x) and x.data_ptr() % x.element_size() == 0


def build(
    grads: Sequence[Tensor], grid: Grid, cooperative: bool
) -> tuple[Plan, "array[int]", Tensor]:
    """A plan; what its tables hold, addresses left at 0; the memory these are to be copied to."""
    members: dict[torch.dtype, list[int]] = {}
    for row, grad in enumerate(grads):
        if grad.numel() > 0:
            members.setdefault(grad.dtype, []).append(row)
    members = members or {grads[0].dtype: []}
    order = [row for rows in members.values() for row in rows]
    n_bytes = sum(grads[row].numel() * grads[row].element_size() for row in order)
    cooperative = cooperative and len(members) == 1 and n_bytes < grid.cooperative_bytes
    most = grid.cooperative_blocks if cooperative else grid.blocks

    tables = array("q", bytes(8 * len(order)))
    layouts: dict[Layout, int] = {(): 0}
    places = []
    for dtype, rows in members.items():
        entries = _entries([grads[row] for row in rows], rows, layouts)
        n_blocks, blocks = _partition(entries, dtype.itemsize, most)
        places.append((dtype, n_blocks, _append(tables, entries), _append(tables, blocks)))
    layout_place = _append(tables, _layout_table(layouts))
    empties = [row for row, grad in enumerate(grads) if grad.numel() == 0]
    empties_place = _append(tables, torch.tensor(empties, dtype=torch.int64, device=HOST))

    device = grads[0].device
    work = torch.empty(len(tables), dtype=torch.int64, device=device)
    addresses = work[: len(order)].split([len(rows) for rows in members.values()])
    groups = [
        Group(dtype, n_blocks, part, work[entry_place], work[block_place])
        for part, (dtype, n_blocks, entry_place, block_place) in zip(addresses, places, strict=True)
    ]
    longest = max(map(len, members.values()))
    slots = longest + max(group.blocks for group in groups)
    plan = Plan(
        device=device,
        n=len(grads),
        wide=any(grad.dtype == torch.float64 for grad in grads),
        cooperative=cooperative,
        groups=groups,
        order=order,
        in_order=order == list(range(len(grads))),
        sizes=tuple(grads[row].element_size() for row in order),
        addresses=work[: len(order)],
        sent=[],
        layouts=work[layout_place],
        empties=work[empties_place],
        scratch=_scratch(slots, longest, device),
    )
    return plan, tables, work


def _scratch(slots: int, entries: int, device: torch.device) -> Scratch:
    return Scratch(
        slots=torch.empty(slots, 5, dtype=torch.float64, device=device),
        counters=torch.zeros(ENTRY_COUNTERS + entries, dtype=torch.int32, device=device),
        factor=torch.empty((), dtype=torch.float64, device=device),
    )


def _entries(grads: Sequence[Tensor], rows: list[int], layouts: dict[Layout, int]) -> Tensor:
    """``[n, ENTRY_COLUMNS]``, the blocks left at 0. New layouts are given the next numbers."""
    entries = torch.zeros(len(grads), ENTRY_COLUMNS, dtype=torch.int64, device=HOST)
    if not grads:
        return entries
    numel = torch.tensor([grad.numel() for grad in grads], device=HOST)
    last = (-(-numel // (CHUNK_BYTES // grads[0].element_size()))).cumsum(0)
    entries[:, NUMEL] = numel
    entries[1:, FIRST_CHUNK] = last[:-1]
    entries[:, LAST_CHUNK] = last
    entries[:, ROW] = torch.tensor(rows, device=HOST)
    for entry, grad in enumerate(grads):
        if not grad.is_contiguous():
            entries[entry, LAYOUT] = layouts.setdefault(layout(grad) or (), len(layouts))
    return entries


def _partition(entries: Tensor, size: int, most: int) -> tuple[int, Tensor]:
    """Cut the chunks into runs of about equal cost, one a block, none of them empty.

    Fills in which blocks an entry has. Returns the number of blocks and ``[blocks + 1, 3]``.
    """
    if len(entries) == 0:
        return 1, torch.zeros(2, BLOCK_COLUMNS, dtype=torch.int64, device=HOST)
    firsts, lasts = (entries[:, c].contiguous() for c in (FIRST_CHUNK, LAST_CHUNK))
    n_chunks = int(lasts[-1])
    cost = torch.full((n_chunks,), CHUNK_BYTES + CHUNK_OVERHEAD, dtype=torch.int64, device=HOST)
    shorter = (lasts - firsts) * CHUNK_BYTES - entries[:, NUMEL] * size
    cost[lasts - 1] -= shorter
    before = cost.cumsum(0) - cost
    total = int(cost.sum())
    most = max(most, -(-total // (1 << 30)))  # a block counts its elements in 32 bits
    n = min(most, n_chunks)
    starts = torch.searchsorted(before.double(), torch.arange(n, device=HOST) * (total / n))
    # At least one chunk each: no start before the one after the last start, none too near the end.
    number = torch.arange(n, device=HOST)
    starts = ((starts - number).cummax(0).values + number).minimum(n_chunks - n + number)
    ends = torch.cat([starts[1:], torch.tensor([n_chunks], device=HOST)])
    entries[:, FIRST_BLOCK] = torch.searchsorted(starts, firsts, right=True) - 1
    last_block = torch.searchsorted(starts, lasts - 1, right=True) - 1
    entries[:, N_BLOCKS] = last_block - entries[:, FIRST_BLOCK] + 1
    table = torch.zeros(n + 1, BLOCK_COLUMNS, dtype=torch.int64, device=HOST)
    table[:n, 0] = starts
    table[n, 0] = n_chunks
    table[:n, 1] = torch.searchsorted(firsts, starts, right=True) - 1
    table[:n, 2] = torch.searchsorted(firsts, ends - 1, right=True) - 1
    return n, table


def _layout_table(layouts: dict[Layout, int]) -> Tensor:
    table = torch.zeros(len(layouts), LAYOUT_COLUMNS, dtype=torch.int64, device=HOST)
    for dims, number in layouts.items():
        flat = [part for dim in dims for part in dim]
        row = [len(dims), *flat] if dims else list(DENSE)
        table[number, : len(row)] = torch.tensor(row, device=HOST)
    return table


def _append(tables: "array[int]", part: Tensor) -> slice:
    start = len(tables)
    tables.extend(part.flatten().tolist())
    return slice(start, len(tables))


def _facts(grads: Sequence[Tensor]) -> tuple[object, ...]:
    """What a plan depends on beside the device, the stream and the grid."""
    strides = None
    if not all(map(Tensor.is_contiguous, grads)):
        strides = tuple((tuple(g.shape), g.stride()) for g in grads)
    return tuple(map(Tensor.numel, grads)), tuple(map(_dtype, grads)), strides


def _stream(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return -1, 0
    return device.index, torch.cuda.current_stream(device).cuda_stream


def _served(x: Tensor) -> bool:
    return (
        x.dtype in DTYPES
        and x.layout == torch.strided
        and not x.is_nested
        and (x.numel() == 0 or layout(x) is not None)
    )


def _on_one_device(grads: Sequence[Tensor]) -> bool:
    return set(map(Tensor.get_device, grads)) == {grads[0].get_device()}


def _usable(plan: Plan, addresses: "array[int]") -> bool:
    """Whether no two gradients begin at one address, and each at a multiple of its element size."""
    distinct = set(addresses)
    if len(distinct) < len(addresses) or 0 in distinct:  # 0: no memory, on the device meta
        return False
    if not addresses or not torch.frombuffer(addresses, dtype=torch.int64).bitwise_and(7).any():
        return True
    return not any(a % size for a, size in zip(addresses, plan.sizes, strict=True))


def _ordered(plan: Plan, addresses: list[int]) -> "array[int]":
    return array("q", addresses if plan.in_order else [addresses[row] for row in plan.order])


def _upload(target: Tensor, values: "array[int]", pinned: Tensor | None) -> None:
    """Copy to the device behind what its stream has to do already."""
    if not values:
        return
    source = torch.frombuffer(values, dtype=torch.int64)
    if target.device.type == "cuda":
        pinned = _new_pinned(len(values)) if pinned is None else pinned
        source = pinned.copy_(source)
    target.copy_(source, non_blocking=True)


def _new_pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=HOST, pin_memory=True)
