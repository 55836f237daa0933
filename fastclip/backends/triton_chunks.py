"""One chunk: the part of the Triton kernels that reads and writes gradients.

Alignment. Chunks are cut from the 16-byte boundary at or before the first element. Elements before
the first are masked off; from there on everything is aligned, so every dense tensor, misaligned
views too, is read and written 16 bytes at a time. Other layouts are read element by element.

Precision. A thread adds float32 over the full tiles of one chunk, and apart from them over its
edges: an element goes through at most 16 additions, so a sum is right to 16 * 2**-24 = 9.5e-7 at
worst, and a 2-norm to half of that. Threads, and tiles and edges, are added in float64. What a
float32 sum cannot hold, and what is not finite, shows in the chunk's sum and maximum: then that
chunk is read again, in float64.

Registers. What is needed again is loaded again rather than kept: with more than 64 registers a
thread fewer than 1,024 threads fit on an SM, too few to keep memory busy.
"""

import triton
import triton.language as tl

from fastclip.backends import triton_plan as plan

NUMEL = tl.constexpr(plan.NUMEL)
FIRST_CHUNK = tl.constexpr(plan.FIRST_CHUNK)
LAST_CHUNK = tl.constexpr(plan.LAST_CHUNK)
LAYOUT = tl.constexpr(plan.LAYOUT)
ENTRY_COLUMNS = tl.constexpr(plan.ENTRY_COLUMNS)
LAYOUT_COLUMNS = tl.constexpr(plan.LAYOUT_COLUMNS)
LOADS = tl.constexpr(plan.LOADS)
LANES = tl.constexpr(plan.LANES)
CHUNK_BYTES = tl.constexpr(plan.CHUNK_BYTES)
LOAD_BYTES = tl.constexpr(16)

# Norm orders 0, 1, 2 and infinity.
COUNT = tl.constexpr(0)
SUM = tl.constexpr(1)
SQUARES = tl.constexpr(2)
MAX = tl.constexpr(3)

# A chunk has at most 2**15 elements, and each square loses at most 2**-126 to the end of float32's
# range (if denormals are flushed): 2**-111 in all, below 2**-24 of any sum that passes.
SMALLEST_SAFE_SUM = tl.constexpr(2.0**-80)


@triton.jit
def larger_or_nan(a, b):
    return tl.where((b > a) | (b != b), b, a)


@triton.jit
def bits_of(x):
    """The bits of numbers that are not negative: they order as the numbers, NaN above infinity."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    if bits.dtype == tl.int64:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _layout_offset(position, layout_ptr):
    """Where the elements of logical `position` lie, in elements from the first."""
    rest = position.to(tl.uint64)  # unsigned division takes fewer registers
    offset = tl.zeros_like(position)
    for dim in range(tl.load(layout_ptr)):
        outer = rest // tl.load(layout_ptr + 1 + 2 * dim).to(tl.uint64)
        index = rest - outer * tl.load(layout_ptr + 1 + 2 * dim).to(tl.uint64)
        offset += index.to(tl.int64) * tl.load(layout_ptr + 2 + 2 * dim)
        rest = outer
    return offset


@triton.jit
def _widen(x, WIDE: tl.constexpr):
    if x.dtype == tl.bfloat16:  # Triton's interpreter gets denormals wrong; the same instruction
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(WIDE)


@triton.jit
def _tile(x, ORDER: tl.constexpr, WIDE: tl.constexpr):
    """Of a tile ``[rows, elements side by side]``, per row, so within a thread: sum, largest
    magnitude, number of zeros. A NaN is lost in the maximum and never in the sum."""
    x = _widen(x, WIDE)
    size = tl.abs(x)
    squares: tl.constexpr = ORDER == SQUARES or ORDER == COUNT  # of a count: is there a NaN?
    total = tl.sum(x * x if squares else size, axis=1)
    return total, tl.max(size, axis=1), tl.sum((x == 0).to(tl.float32), axis=1)


@triton.jit
def _place(addresses_ptr, entries_ptr, entry, DTYPE: tl.constexpr):
    """Where an entry lies: its address, the number of its layout, and its head: how many elements
    lie between the 16-byte boundary before a dense tensor and its first element."""
    address = tl.load(addresses_ptr + entry)
    layout = tl.load(entries_ptr + entry * ENTRY_COLUMNS + LAYOUT)
    head = address % LOAD_BYTES // (DTYPE.primitive_bitwidth // 8)
    return address, layout, tl.where(layout > 0, 0, head).to(tl.int32)


@triton.jit
def _chunk_end(entries_ptr, entry, chunk, head, DTYPE: tl.constexpr):
    """Where a chunk of an entry ends, counted from where it begins; the last one takes what the
    shift by `head` pushed over its end."""
    CHUNK: tl.constexpr = CHUNK_BYTES // (DTYPE.primitive_bitwidth // 8)
    entry_ptr = entries_ptr + entry * ENTRY_COLUMNS
    n_chunks = tl.load(entry_ptr + LAST_CHUNK) - tl.load(entry_ptr + FIRST_CHUNK)
    rest = tl.load(entry_ptr + NUMEL) + head - chunk.to(tl.int64) * CHUNK
    return tl.where(chunk + 1 == n_chunks, rest, CHUNK).to(tl.int32)


@triton.jit
def _aligned(address, chunk, DTYPE: tl.constexpr):
    """Where a chunk of a dense tensor begins. That this is a multiple of 16 is no promise of the
    caller but computed here: a hint that is wrong would be a fault."""
    begin = address - address % LOAD_BYTES + chunk.to(tl.int64) * CHUNK_BYTES
    return tl.multiple_of(begin.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _full_tiles(begin, end, TILE: tl.constexpr):
    """The tiles with all their elements between `begin`, in the first tile or 0, and `end`."""
    first = (begin > 0).to(tl.int32)
    return first, tl.maximum(first, end // TILE)


@triton.jit
def _edge(step, begin, end, inner, STEP: tl.constexpr):
    """The mask of a step that is not full."""
    return (inner >= begin - step * STEP) & (inner < end - step * STEP)


@triton.jit
def _next_edge(step, full_begin, full_end):
    """From one step that is in no full tile to the next one."""
    return tl.where(step + 1 == full_begin * LOADS, full_end * LOADS, step + 1)


@triton.jit
def _dense_chunk(start, begin, end, ORDER: tl.constexpr, DTYPE: tl.constexpr):
    """Sum in float64, largest magnitude and number of zeros, as `_tile`, of the elements from
    `begin` to `end` after the aligned `start`."""
    SIDE: tl.constexpr = LOAD_BYTES // (DTYPE.primitive_bitwidth // 8)
    STEP: tl.constexpr = LANES * SIDE
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    inner = tl.arange(0, LANES)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    total = tl.zeros([LANES], dtype=WIDE)
    largest = tl.zeros([LANES], dtype=WIDE)
    zeros = tl.zeros([LANES], dtype=tl.float32)  # exact, and one instruction less than integers

    full_begin, full_end = _full_tiles(begin, end, LOADS * STEP)
    # The edges first, and in float64 before the rest: afterwards only a number of them is left.
    edges = tl.full([], 0.0, tl.float64)
    step = tl.where(begin > 0, 0, full_end * LOADS)
    if step * STEP < end:
        while step * STEP < end:
            mask = _edge(step, begin, end, inner, STEP)
            x = tl.load(start + step * STEP + inner, mask=mask, other=0)
            p, m, z = _tile(x, ORDER, WIDE)
            total += p
            largest = tl.maximum(largest, m)
            zeros += z - tl.sum((~mask).to(tl.float32), axis=1)
            step = _next_edge(step, full_begin, full_end)
        edges = tl.sum(total.to(tl.float64))
        total = tl.zeros([LANES], dtype=WIDE)

    tile = start + full_begin * (LOADS * STEP)
    for _ in range(full_begin, full_end):
        x0 = tl.load(tile + inner)
        x1 = tl.load(tile + STEP + inner)
        x2 = tl.load(tile + 2 * STEP + inner)
        x3 = tl.load(tile + 3 * STEP + inner)
        p0, m0, z0 = _tile(x0, ORDER, WIDE)
        p1, m1, z1 = _tile(x1, ORDER, WIDE)
        p2, m2, z2 = _tile(x2, ORDER, WIDE)
        p3, m3, z3 = _tile(x3, ORDER, WIDE)
        total += (p0 + p1) + (p2 + p3)
        largest = tl.maximum(largest, tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)))
        zeros += (z0 + z1) + (z2 + z3)
        tile += LOADS * STEP
    total = edges + tl.sum(total.to(tl.float64))
    return total, tl.max(largest, axis=0), tl.sum(zeros).to(tl.int32)


@triton.jit
def _exact_chunk(start, begin, n, layout_ptr, ORDER: tl.constexpr):
    """The row of the `n` elements from logical position `begin` on, in any layout, with nothing
    rounded but float64 sums."""
    inner = tl.arange(0, LANES)
    power = tl.zeros([LANES], dtype=tl.float64)
    largest = tl.zeros([LANES], dtype=tl.float64)
    counts = tl.zeros([LANES], dtype=tl.int32)  # NaN, infinities, zeros: 10 bits each, 129 at most
    for first in range(0, n, LANES):
        mask = first + inner < n
        offset = _layout_offset(begin + first + inner, layout_ptr)
        x = _widen(tl.load(start + offset, mask=mask, other=0), tl.float64)
        size = tl.abs(x)
        if ORDER == COUNT:
            power += (x != 0).to(tl.float64)
        if ORDER == SUM:
            power += size
        if ORDER == SQUARES:
            power += x * x
        if ORDER == MAX:
            power = larger_or_nan(power, size)
        is_nan = x != x
        is_inf = size == float("inf")
        largest = tl.maximum(largest, tl.where(is_nan | is_inf, 0.0, size))
        counts += tl.where(is_nan, 1, tl.where(is_inf, 1 << 10, 0))
        counts += tl.where(mask & (x == 0), 1 << 20, 0)
    if ORDER == MAX:
        total = from_bits(tl.max(bits_of(power), axis=0))
    else:
        total = tl.sum(power)
    nan = tl.sum(counts & 1023)
    inf = tl.sum((counts >> 10) & 1023)
    return total, tl.max(largest, axis=0), nan, inf, tl.sum(counts >> 20)


@triton.jit
def entry_begin(entries_ptr, entry):
    return tl.load(entries_ptr + entry * ENTRY_COLUMNS + FIRST_CHUNK).to(tl.int32)


@triton.jit
def measure_chunk(
    addresses_ptr, entries_ptr, layouts_ptr, entry, chunk, ORDER: tl.constexpr, DTYPE: tl.constexpr
):
    """One chunk's row. What the exact part needs it loads again: the registers are wanted for the
    other part."""
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    CHUNK: tl.constexpr = CHUNK_BYTES // (DTYPE.primitive_bitwidth // 8)
    number = chunk - entry_begin(entries_ptr, entry)  # within the entry
    address, layout, head = _place(addresses_ptr, entries_ptr, entry, DTYPE)
    nan = tl.full([], 0, tl.int32)
    inf = tl.full([], 0, tl.int32)
    zeros = tl.full([], 0, tl.int32)
    power = tl.full([], 0.0, tl.float64)
    largest = tl.full([], 0.0, WIDE)
    trusted = layout == 0
    if trusted:
        end = _chunk_end(entries_ptr, entry, number, head, DTYPE)
        begin = tl.where(number == 0, head, 0)
        power, largest, zeros = _dense_chunk(
            _aligned(address, number, DTYPE), begin, end, ORDER, DTYPE
        )
        trusted = (largest < float("inf")) & (power == power)  # all elements are finite
        if DTYPE != tl.float64 and (ORDER == SUM or ORDER == SQUARES):
            fits = (power >= SMALLEST_SAFE_SUM) & (power < float("inf"))
            trusted = trusted & (fits | (largest == 0))
        if ORDER == COUNT:
            power = (end - begin - zeros).to(tl.float64)
        if ORDER == MAX:
            power = largest.to(tl.float64)
    if not trusted:
        number = chunk - entry_begin(entries_ptr, entry)
        address, layout, head = _place(addresses_ptr, entries_ptr, entry, DTYPE)
        skip = tl.where(number == 0, head, 0)
        n = _chunk_end(entries_ptr, entry, number, head, DTYPE) - skip
        start = address.to(tl.pointer_type(DTYPE))
        begin = number.to(tl.int64) * CHUNK - head + skip
        layout_ptr = layouts_ptr + layout * LAYOUT_COLUMNS
        power, exact, nan, inf, zeros = _exact_chunk(start, begin, n, layout_ptr, ORDER)
        largest = exact.to(WIDE)
    return power, largest, nan, inf, zeros


@triton.jit
def _scale_dense_chunk(start, begin, end, factor, DTYPE: tl.constexpr):
    """Multiply the elements from `begin` to `end` after the aligned `start`, from the back."""
    STEP: tl.constexpr = LANES * LOAD_BYTES // (DTYPE.primitive_bitwidth // 8)
    inner = tl.arange(0, STEP)
    full_begin, full_end = _full_tiles(begin, end, LOADS * STEP)
    step = tl.where(begin > 0, 0, full_end * LOADS)
    while step * STEP < end:
        mask = _edge(step, begin, end, inner, STEP)
        elements = start + step * STEP + inner
        x = _widen(tl.load(elements, mask=mask), factor.dtype)
        tl.store(elements, (x * factor).to(DTYPE), mask=mask)
        step = _next_edge(step, full_begin, full_end)
    for back in range(full_begin, full_end):
        elements = start + (full_begin + full_end - 1 - back) * (LOADS * STEP) + inner
        x0 = tl.load(elements)
        x1 = tl.load(elements + STEP)
        x2 = tl.load(elements + 2 * STEP)
        x3 = tl.load(elements + 3 * STEP)
        tl.store(elements, (_widen(x0, factor.dtype) * factor).to(DTYPE))
        tl.store(elements + STEP, (_widen(x1, factor.dtype) * factor).to(DTYPE))
        tl.store(elements + 2 * STEP, (_widen(x2, factor.dtype) * factor).to(DTYPE))
        tl.store(elements + 3 * STEP, (_widen(x3, factor.dtype) * factor).to(DTYPE))


@triton.jit
def _scale_strided_chunk(start, begin, n, layout_ptr, factor, DTYPE: tl.constexpr):
    """Multiply the `n` elements from logical position `begin` on."""
    inner = tl.arange(0, LANES)
    for first in range(0, n, LANES):
        mask = first + inner < n
        elements = start + _layout_offset(begin + first + inner, layout_ptr)
        x = _widen(tl.load(elements, mask=mask), factor.dtype)
        tl.store(elements, (x * factor).to(DTYPE), mask=mask)


@triton.jit
def scale_chunk(addresses_ptr, entries_ptr, layouts_ptr, entry, chunk, factor, DTYPE: tl.constexpr):
    CHUNK: tl.constexpr = CHUNK_BYTES // (DTYPE.primitive_bitwidth // 8)
    address, layout, head = _place(addresses_ptr, entries_ptr, entry, DTYPE)
    end = _chunk_end(entries_ptr, entry, chunk, head, DTYPE)
    if layout == 0:
        begin = tl.where(chunk == 0, head, 0)
        _scale_dense_chunk(_aligned(address, chunk, DTYPE), begin, end, factor, DTYPE)
    else:
        start = address.to(tl.pointer_type(DTYPE))
        layout_ptr = layouts_ptr + layout * LAYOUT_COLUMNS
        _scale_strided_chunk(start, chunk.to(tl.int64) * CHUNK, end, layout_ptr, factor, DTYPE)
