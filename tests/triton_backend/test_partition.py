"""Which block works on what. Needs no Triton."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.backends import triton_plan
from fastclip.backends.triton_plan import (
    CHUNK_BYTES,
    FIRST_BLOCK,
    FIRST_CHUNK,
    LAST_CHUNK,
    N_BLOCKS,
)

PER_CHUNK = CHUNK_BYTES // 4

sizes = st.lists(
    st.one_of(st.integers(1, 50), st.integers(1, 40).map(lambda n: n * PER_CHUNK + n % 3 - 1)),
    min_size=1,
    max_size=30,
)


def _partition(numel: list[int], most: int) -> tuple[torch.Tensor, int, list[list[int]]]:
    grads = [torch.empty(0).expand(0).new_empty(1).expand(1) for _ in numel]
    entries = triton_plan._entries(grads, list(range(len(numel))), {(): 0})
    entries[:, triton_plan.NUMEL] = torch.tensor(numel)
    last = torch.tensor([-(-n // PER_CHUNK) for n in numel]).cumsum(0)
    entries[1:, FIRST_CHUNK], entries[:, LAST_CHUNK] = last[:-1], last
    n, blocks = triton_plan._partition(entries, 4, most)
    return entries, n, blocks.tolist()


@settings(deadline=None)
@given(numel=sizes, most=st.integers(1, 70))
def test_every_chunk_has_one_block_and_no_block_is_empty(numel: list[int], most: int) -> None:
    entries, n, blocks = _partition(numel, most)
    n_chunks = int(entries[-1, LAST_CHUNK])
    assert n == min(most, n_chunks)
    starts = [block[0] for block in blocks]
    assert starts[0] == 0
    assert starts[-1] == n_chunks
    assert all(a < b for a, b in pairwise(starts))
    owner = [entry for entry, row in enumerate(entries.tolist()) for _ in range(row[1], row[2])]
    for block in range(n):
        assert blocks[block][1] == owner[starts[block]]
        assert blocks[block][2] == owner[starts[block + 1] - 1]
    for entry, row in enumerate(entries.tolist()):
        mine = [b for b in range(n) if blocks[b][1] <= entry <= blocks[b][2]]
        assert mine == list(range(row[FIRST_BLOCK], row[FIRST_BLOCK] + row[N_BLOCKS]))
    slots = [entry + b for b in range(n) for entry in range(blocks[b][1], blocks[b][2] + 1)]
    assert len(set(slots)) == len(slots)  # each part its own


def test_blocks_have_about_the_same_bytes() -> None:
    numel = [50_000_000, *300 * [768], *24 * [768 * 3072]]
    entries, n, blocks = _partition(numel, 528)
    cost = torch.tensor([block[0] for block in blocks]).diff()
    assert n == 528
    big = cost[: int(entries[0, N_BLOCKS]) - 1]
    assert int(big.max()) - int(big.min()) <= 1
    assert int(cost.max()) < 5 * int(big.max())  # of the 768s, each a chunk with little to read


def test_a_block_counts_in_32_bits() -> None:
    numel = [3 * (1 << 31)]
    _, n, blocks = _partition(numel, 2)
    assert n > 2
    assert max(b[0] - a[0] for a, b in pairwise(blocks)) * PER_CHUNK < 1 << 31


@pytest.mark.parametrize(
    ("make", "dims"),
    [
        (lambda: torch.empty(3, 4), ()),
        (lambda: torch.empty(3, 4).t(), ()),
        (lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), ()),
        (lambda: torch.empty(12)[::3], ((4, 3),)),
        (lambda: torch.empty(6, 8)[:, :5], ((5, 1), (6, 8))),
        (lambda: torch.empty(4, 6, 8)[:, :, ::2], ((96, 2),)),
        (lambda: torch.empty(3, 1).expand(3, 4), None),
        (lambda: torch.empty(30).as_strided((3, 3), (2, 2)), None),
        (lambda: torch.empty(0, 3), ()),
    ],
)
def test_layouts(make: object, dims: object) -> None:
    assert callable(make)
    assert triton_plan.layout(make()) == dims
