"""The Triton kernels: measure, scale, and both in one launch.

A launch serves the gradients of one dtype. Every block (program) works through a contiguous run of
chunks that the plan gave it. An entry is a gradient with elements, a slot the row of that part of
an entry which one block saw.

Order between blocks. What a block writes for others is followed by a barrier of its threads and an
atomic increment with release semantics; the block whose increment (acquire) is the last one sees
all of it, and reads it past the first-level cache. Which block that is has no influence on the
result: sums are taken in the order of the slots, never by atomics.
"""

import triton
import triton.language as tl

from fastclip import table
from fastclip.backends import triton_plan as plan
from fastclip.backends.triton_chunks import (
    ENTRY_COLUMNS,
    LANES,
    LAST_CHUNK,
    MAX,
    SQUARES,
    SUM,
    bits_of,
    entry_begin,
    from_bits,
    larger_or_nan,
    measure_chunk,
    scale_chunk,
)

ROW = tl.constexpr(plan.ROW)
FIRST_BLOCK = tl.constexpr(plan.FIRST_BLOCK)
N_BLOCKS = tl.constexpr(plan.N_BLOCKS)
BLOCK_COLUMNS = tl.constexpr(plan.BLOCK_COLUMNS)
TICKET = tl.constexpr(plan.TICKET)
GENERATION = tl.constexpr(plan.GENERATION)
ENTRY_COUNTERS = tl.constexpr(plan.ENTRY_COUNTERS)
ROW_COLUMNS = tl.constexpr(table.COLUMNS)
NAN = tl.constexpr(table.NAN)
INF = tl.constexpr(table.INF)
EPS = tl.constexpr(table.EPS)

# Their values change from step to step: nothing may be compiled for one of them.
VALUES = ["n_empties", "n_rows", "max_norm_bits", "inv_scale_bits", "skip"]
POINTERS = [
    *("addresses_ptr", "entries_ptr", "layouts_ptr", "blocks_ptr", "slots_ptr", "counters_ptr"),
    *("empties_ptr", "table_ptr", "total_ptr", "coef_ptr", "factor_ptr"),
    *("max_norm_ptr", "inv_scale_ptr"),
]


@triton.jit
def _block_end(blocks_ptr):
    return tl.load(blocks_ptr + BLOCK_COLUMNS * (tl.program_id(0) + 1)).to(tl.int32)


@triton.jit
def _entry_end(entries_ptr, entry):
    return tl.load(entries_ptr + entry * ENTRY_COLUMNS + LAST_CHUNK).to(tl.int32)


@triton.jit
def _part(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, entry, chunk,
    ORDER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The row of this block's chunks of an entry, from `chunk` on, and the chunk after them."""
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    power = tl.full([], 0.0, tl.float64)
    largest = tl.full([], 0.0, WIDE)
    nan = tl.full([], 0, tl.int32)
    inf = tl.full([], 0, tl.int32)
    zeros = tl.full([], 0, tl.int32)
    while chunk < tl.minimum(_entry_end(entries_ptr, entry), _block_end(blocks_ptr)):
        p, m, n, i, z = measure_chunk(
            addresses_ptr, entries_ptr, layouts_ptr, entry, chunk, ORDER, DTYPE
        )
        power = larger_or_nan(power, p) if ORDER == MAX else power + p
        largest = tl.maximum(largest, m)
        nan += n
        inf += i
        zeros += z
        chunk += 1
    return power, largest.to(tl.float64), nan, inf, zeros, chunk


@triton.jit
def _store_row(row_ptr, power, largest, nan, inf, zeros):
    tl.store(row_ptr, power)
    tl.store(row_ptr + 1, largest)
    tl.store(row_ptr + 2, nan.to(tl.float64))
    tl.store(row_ptr + 3, inf.to(tl.float64))
    tl.store(row_ptr + 4, zeros.to(tl.float64))


@triton.jit
def _unscale(power, largest, inv_scale_ptr, inv_scale_bits, ORDER: tl.constexpr):
    """Of the elements times `inv_scale`."""
    factor = tl.abs(_scalar(inv_scale_ptr, inv_scale_bits))
    if ORDER == SUM or ORDER == MAX:
        power *= factor
    if ORDER == SQUARES:
        power *= factor * factor
    return power, largest * factor


@triton.jit
def _column(column_ptr, n, LARGEST: tl.constexpr):
    """The sum, or the largest (a NaN wins), of a column of `n` rows that other blocks wrote, in an
    order that depends on n alone."""
    inner = tl.arange(0, LANES)
    value = tl.zeros([LANES], dtype=tl.float64)
    for first in range(0, n, LANES):
        elements = column_ptr + (first + inner) * ROW_COLUMNS
        x = tl.load(elements, mask=first + inner < n, other=0.0, cache_modifier=".cg")
        value = larger_or_nan(value, x) if LARGEST else value + x
    if LARGEST:
        return from_bits(tl.max(bits_of(tl.abs(value)), axis=0))  # of a NaN too: 0 * inf has a sign
    else:
        return tl.sum(value)


@triton.jit
def _is_last(counter_ptr, n):
    """Whether this block is the last of `n` to come here; then the counter is 0 again.

    Release: what any thread of this block has written can be seen by whoever finds the counter
    increased. Acquire: the last block sees what all others wrote.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == n - 1
    tl.debug_barrier()
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _scalar(pointer, bits):
    """A float64 that is on the device, or else came as an argument, by its bits."""
    if pointer is not None:
        return tl.load(pointer).to(tl.float64)
    else:
        return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _finish(
    table_ptr, n_rows, total_ptr, coef_ptr, factor_ptr, max_norm, inv_scale, skip,
    ORDER: tl.constexpr,
):  # fmt: skip
    """From the table to the total norm, the coefficient and the factor of the elements."""
    total = _column(table_ptr, n_rows, ORDER == MAX)
    if ORDER == SQUARES:
        total = tl.sqrt(total)
    coef = max_norm / (total + EPS)
    coef = tl.where(coef > 1.0, 1.0, coef)  # a NaN stays
    coef = tl.where(max_norm == float("inf"), 1.0, coef)
    factor = coef * inv_scale
    if skip != 0:
        nan = _column(table_ptr + NAN, n_rows, False)
        inf = _column(table_ptr + INF, n_rows, False)
        coef = tl.where(nan + inf > 0, 1.0, coef)
        factor = tl.where(nan + inf > 0, 1.0, factor)
    tl.store(total_ptr, total.to(total_ptr.dtype.element_ty))
    tl.store(coef_ptr, coef)
    tl.store(factor_ptr, factor)


@triton.jit
def _measure(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, slots_ptr, counters_ptr, table_ptr,
    inv_scale_ptr, inv_scale_bits, ORDER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The rows of this block's entries. Blocks share an entry at the ends of their runs only."""
    chunk = tl.load(blocks_ptr + BLOCK_COLUMNS * tl.program_id(0)).to(tl.int32)
    entry = tl.load(blocks_ptr + BLOCK_COLUMNS * tl.program_id(0) + 1).to(tl.int32)
    while chunk < _block_end(blocks_ptr):
        power, largest, nan, inf, zeros, chunk = _part(
            addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, entry, chunk, ORDER, DTYPE
        )
        entry_ptr = entries_ptr + entry * ENTRY_COLUMNS
        row_ptr = table_ptr + tl.load(entry_ptr + ROW) * ROW_COLUMNS
        n_blocks = tl.load(entry_ptr + N_BLOCKS).to(tl.int32)
        if n_blocks == 1:
            power, largest = _unscale(power, largest, inv_scale_ptr, inv_scale_bits, ORDER)
            _store_row(row_ptr, power, largest, nan, inf, zeros)
        else:
            # Entry and block only ever grow along the list: no two parts have the same sum.
            slot = entry + tl.program_id(0)
            _store_row(slots_ptr + slot * ROW_COLUMNS, power, largest, nan, inf, zeros)
            if _is_last(counters_ptr + ENTRY_COUNTERS + entry, n_blocks):
                first_slot = entry + tl.load(entry_ptr + FIRST_BLOCK)
                first_ptr = slots_ptr + first_slot * ROW_COLUMNS
                power = _column(first_ptr, n_blocks, ORDER == MAX)
                largest = _column(first_ptr + 1, n_blocks, True)
                power, largest = _unscale(power, largest, inv_scale_ptr, inv_scale_bits, ORDER)
                tl.store(row_ptr, power)
                tl.store(row_ptr + 1, largest)
                for column in range(2, ROW_COLUMNS):
                    tl.store(row_ptr + column, _column(first_ptr + column, n_blocks, False))
        entry += 1


@triton.jit
def _clear_rows(table_ptr, empties_ptr, n_empties):
    """The rows of tensors without elements, which no chunk belongs to."""
    inner = tl.arange(0, LANES)
    for start in range(0, n_empties, LANES):
        mask = start + inner < n_empties
        rows = tl.load(empties_ptr + start + inner, mask=mask, other=0)
        for column in tl.static_range(ROW_COLUMNS):
            tl.store(table_ptr + rows * ROW_COLUMNS + column, 0.0, mask=mask)


@triton.jit
def _scale(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, factor_ptr, PER_ROW: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Multiply this block's chunks, the last one first: the end of the list was read last."""
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    block = tl.program_id(0)
    begin = tl.load(blocks_ptr + BLOCK_COLUMNS * block).to(tl.int32)
    end = tl.load(blocks_ptr + BLOCK_COLUMNS * (block + 1)).to(tl.int32)
    entry = tl.load(blocks_ptr + BLOCK_COLUMNS * block + 2).to(tl.int32)
    if not PER_ROW:
        factor = tl.load(factor_ptr, cache_modifier=".cg").to(WIDE)
        end = tl.where(factor == 1, begin, end)  # nothing to write: no chunk is left
    while end > begin:
        first = entry_begin(entries_ptr, entry)
        start = tl.maximum(first, begin)
        n = end - start
        if PER_ROW:
            row = tl.load(entries_ptr + entry * ENTRY_COLUMNS + ROW)
            factor = tl.load(factor_ptr + row).to(WIDE)
            n = tl.where(factor == 1, 0, n)
        for back in range(n):
            chunk = end - 1 - back - first
            scale_chunk(addresses_ptr, entries_ptr, layouts_ptr, entry, chunk, factor, DTYPE)
        end = start
        entry -= 1


@triton.jit(do_not_specialize=VALUES, do_not_specialize_on_alignment=POINTERS)
def measure_kernel(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, slots_ptr, counters_ptr,
    empties_ptr, n_empties: "i64", table_ptr, n_rows: "i64", total_ptr, coef_ptr, factor_ptr,
    max_norm_ptr, max_norm_bits: "i64", inv_scale_ptr, inv_scale_bits: "i64", skip: "i64",
    ORDER: tl.constexpr, DTYPE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The rows of one dtype's gradients. The last block of the last launch finishes the list."""
    _measure(
        addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, slots_ptr, counters_ptr, table_ptr,
        inv_scale_ptr, inv_scale_bits, ORDER, DTYPE,
    )  # fmt: skip
    if LAST:
        if tl.program_id(0) == 0:
            _clear_rows(table_ptr, empties_ptr, n_empties)
        if _is_last(counters_ptr + TICKET, tl.num_programs(0)):
            max_norm = _scalar(max_norm_ptr, max_norm_bits)
            inv_scale = _scalar(inv_scale_ptr, inv_scale_bits)
            _finish(
                table_ptr, n_rows, total_ptr, coef_ptr, factor_ptr, max_norm, inv_scale, skip, ORDER
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def scale_kernel(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, factor_ptr,
    PER_ROW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Multiply one dtype's gradients by a factor, or each by its own; by 1, nothing is written."""
    _scale(addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, factor_ptr, PER_ROW, DTYPE)


@triton.jit(do_not_specialize=VALUES, do_not_specialize_on_alignment=POINTERS)
def clip_kernel(
    addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, slots_ptr, counters_ptr,
    empties_ptr, n_empties: "i64", table_ptr, n_rows: "i64", total_ptr, coef_ptr, factor_ptr,
    max_norm_ptr, max_norm_bits: "i64", inv_scale_ptr, inv_scale_bits: "i64", skip: "i64",
    ORDER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Both passes, for a cooperative launch: every block waits until the last one has finished.

    The generation is read before this block's ticket is taken, so no other can have raised it yet.
    """
    generation_ptr = counters_ptr + GENERATION
    before = tl.atomic_add(generation_ptr, 0, sem="relaxed", scope="gpu")
    _measure(
        addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, slots_ptr, counters_ptr, table_ptr,
        inv_scale_ptr, inv_scale_bits, ORDER, DTYPE,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        _clear_rows(table_ptr, empties_ptr, n_empties)
    if _is_last(counters_ptr + TICKET, tl.num_programs(0)):
        max_norm = _scalar(max_norm_ptr, max_norm_bits)
        inv_scale = _scalar(inv_scale_ptr, inv_scale_bits)
        _finish(
            table_ptr, n_rows, total_ptr, coef_ptr, factor_ptr, max_norm, inv_scale, skip, ORDER
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(generation_ptr, 1, sem="release", scope="gpu")
    else:
        now = before
        while now == before:
            now = tl.atomic_add(generation_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    _scale(addresses_ptr, entries_ptr, layouts_ptr, blocks_ptr, factor_ptr, False, DTYPE)
