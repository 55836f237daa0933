"""What the case table has no room for: chunk borders, long lists, 2**31 elements, one launch."""

import math
import warnings

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip.backends import Backend, reference, triton_plan
from fastclip.backends import triton as backend
from fastclip.backends.triton_plan import CHUNK_BYTES, LANES, LOADS, Grid
from fastclip.testing import reference64
from fastclip.testing.compare import bitwise_equal, norm_error, scale_error, table_error

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
EVERY = (F32, BF16, F16, F64)


def _same(grads: list[Tensor], p: float = 2.0) -> None:
    """Table, norm and clipped gradients against the float64 reference."""
    before = [grad.clone() for grad in grads]
    total = reference64.total_norm(before, p)
    table, norm, coef = backend.clip_(grads, p, total / 3, None)
    assert table_error(table, reference64.table(before, p), before, p) <= 1
    assert norm_error(norm, total, before) <= 1
    assert float(coef) == pytest.approx(total / 3 / (total + 1e-6), rel=1e-6)
    for after, old in zip(grads, before, strict=True):
        assert scale_error(after, old, 1 / 3, 1e-5) <= 1


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_borders(dtype: torch.dtype, offset: int) -> None:
    side = 16 // dtype.itemsize
    step = LANES * side
    for border in (side, step, LOADS * step, CHUNK_BYTES // dtype.itemsize):
        storage = torch.randn(3 * (border + 8)).to(dtype)
        sizes = (border - 1, border, border + 1)
        pieces = zip(storage.split(border + 8), sizes, strict=True)
        _same([piece[offset : offset + n] for piece, n in pieces])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_several_chunks_and_blocks(dtype: torch.dtype) -> None:
    chunk = CHUNK_BYTES // dtype.itemsize
    grads = [torch.randn(n).to(dtype) for n in (5, 9 * chunk + 3, 0, chunk - 1, 7)]
    _same(grads)
    bad = [torch.randn(5 * chunk), torch.randn(40)]
    bad[0][[3, chunk, 3 * chunk + 17]] = torch.tensor([math.nan, math.inf, -math.inf])
    bad[0][2 * chunk : 2 * chunk + 9] = 0
    for _ in range(2):  # the second time finds the counters as the first one did
        table = backend.measure(bad, 1.0, None)
        assert table[:, 2:].tolist() == [[1, 2, 9], [0, 0, 0]]
        assert math.isnan(table[0, 0])


def test_three_thousand_tensors() -> None:
    grads = [torch.randn(i % 4) for i in range(3000)]
    before = [grad.clone() for grad in grads]
    table, total, coef = backend.clip_(grads, 2.0, 1.0, None)
    assert torch.allclose(table, reference.measure(before, 2.0, None), rtol=1e-6, atol=0)
    assert float(total) == pytest.approx(reference64.total_norm(before, 2.0), rel=1e-6)
    assert torch.allclose(torch.cat(grads), torch.cat(before) * coef.float(), rtol=1e-6, atol=0)


def test_numbers_on_the_device_and_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    scalar = backend._scalar
    grads = [torch.randn(300), torch.randn(70).to(BF16)]
    on_host = [grad.clone() for grad in grads]
    a = backend.clip_(grads, 2.0, torch.tensor(0.7, dtype=F64), torch.tensor(0.25))
    monkeypatch.setattr(backend, "_scalar", lambda value, device: scalar(float(value), device))
    b = backend.clip_(on_host, 2.0, 0.7, torch.tensor(0.25))
    assert all(bitwise_equal(x, y) for x, y in zip((*a, *grads), (*b, *on_host), strict=True))


def test_one_launch_equals_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block: the interpreter runs them one after another, and none can wait for a later."""
    grads = [torch.randn(n) for n in (3, 0, 40_000, 17, 20_000)]
    two = [grad.clone() for grad in grads]
    monkeypatch.setattr(backend, "_grid", lambda device: Grid(1))
    expected = backend.clip_(two, 2.0, 1.0, None)
    monkeypatch.setattr(backend, "_grid", lambda device: Grid(1, 1 << 20, 1))
    for _ in range(2):
        one = [grad.clone() for grad in grads]
        got = backend.clip_(one, 2.0, 1.0, None)
        assert all(bitwise_equal(x, y) for x, y in zip(got, expected, strict=True))
        assert all(bitwise_equal(x, y) for x, y in zip(one, two, strict=True))


def test_the_same_bits_again_and_whatever_moves() -> None:
    grads = [torch.randn(n) for n in (100_000, 3, 50_000)]
    first = backend.measure(grads, 2.0, None)
    moved = [grad.clone() for grad in grads]
    assert bitwise_equal(backend.measure(moved, 2.0, None), first)
    assert bitwise_equal(backend.measure(grads, 2.0, None), first)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_more_than_2_31_elements(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunks of such a tensor; its memory before them is reserved and never touched."""
    n = (1 << 31) + 5
    grad = torch.empty(n, dtype=dtype)
    grad[-40_000:] = 2.0
    chunk = CHUNK_BYTES // dtype.itemsize
    n_chunks = -(-n // chunk)
    seen = n - (n_chunks - 2) * chunk
    build = triton_plan.build

    def only_the_end(grads: list[Tensor], grid: Grid, cooperative: bool) -> object:
        plan, tables, work = build(grads, grid, cooperative)
        (group,) = plan.groups
        # one block for the last two chunks, and an entry that has no other block
        start = len(tables) - plan.layouts.numel() - group.grid.numel()
        tables[start : start + 6] = type(tables)("q", [n_chunks - 2, 0, 0, n_chunks, 0, 0])
        entry = len(plan.order)
        tables[entry + triton_plan.FIRST_BLOCK], tables[entry + triton_plan.N_BLOCKS] = 0, 1
        group.blocks = 1
        return plan, tables, work

    monkeypatch.setattr(triton_plan, "build", only_the_end)
    monkeypatch.setattr(backend, "_plans", triton_plan.Plans())
    table, total, _ = backend.clip_([grad], 1.0, float(seen), None)
    assert table[0].tolist() == [2.0 * seen, 2.0, 0, 0, 0]
    assert float(total) == 2.0 * seen
    assert (grad[-seen:] - 1).abs().max() < 1e-6
    assert grad[-40_000:-seen].eq(2.0).all()  # the other blocks' chunks


def test_strides_beyond_2_31() -> None:
    step = (1 << 31) + 3
    storage = torch.empty(2 * step + 1, dtype=F16)
    grad = storage[::step]
    grad[:] = torch.tensor([3.0, 0.0, -4.0])
    table, total, _ = backend.clip_([grad], 2.0, 2.5, None)
    assert table.tolist() == [[25.0, 4.0, 0.0, 0.0, 1.0]]
    assert float(total) == 5.0
    assert grad.tolist() == pytest.approx([1.5, 0.0, -2.0], rel=1e-3)


def test_public_functions() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    with fastclip.backend("triton") as chosen:
        assert chosen.name == "triton"
        assert float(fastclip.clip_grad_norm_([param], 1.0)) == 5.0
        assert fastclip.grad_stats([param]).norms.tolist() == pytest.approx([1.0], rel=1e-5)
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_what_the_kernels_refuse_goes_to_the_reference(triton: Backend) -> None:
    many = torch.randn(3 * (2, 3, 2)).permute(8, 0, 7, 1, 6, 2, 5, 3, 4)[..., ::2]
    grads = [torch.randn(70), torch.randn(5, dtype=torch.complex64), many, torch.randn(9)]
    assert not triton_plan.served(grads[1])
    before = [grad.clone() for grad in grads]
    table = triton.measure(grads, 2.0, None)
    assert table_error(table, reference64.table(before, 2.0), before, 2.0) <= 1
    coef = torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=F64)
    triton.scale_(grads, coef)
    for after, old, c in zip(grads, before, coef.tolist(), strict=True):
        assert scale_error(after, old, c) <= 1
    assert backend.quick_measure(grads, 2.0) is None
    assert backend.quick_measure(grads[:1], 3.0) is None
    assert backend.quick_measure([grads[0], grads[0]], 2.0) is None
    assert not backend.quick_scale_([torch.zeros(3).to_sparse()], coef[0])


def test_the_repaired_interpreter_rounds_to_nearest_even() -> None:
    import numpy as np

    from tests.triton_backend.interpreter import to_bfloat16

    every = torch.randint(-(1 << 31), 1 << 31, (100_000,), dtype=torch.int64)
    special = torch.tensor([math.nan, math.inf, 1e-45, -0.0])
    x = torch.cat([every.to(torch.int32).view(F32), special])
    got = torch.from_numpy(to_bfloat16(x.numpy()).astype(np.int16)).view(BF16)
    assert torch.equal(got.isnan(), x.isnan())
    assert bitwise_equal(got[~x.isnan()], x.to(BF16)[~x.isnan()])


def test_autograd_is_told_of_a_write() -> None:
    grads = [torch.ones(4)]
    before = grads[0]._version
    backend.quick_clip_(grads, 2.0, math.inf)  # measures only
    assert grads[0]._version == before
    backend.quick_clip_(grads, 2.0, 1.0)
    assert grads[0]._version > before
    before = grads[0]._version
    backend.quick_scale_(grads, torch.tensor(0.5, dtype=F64))
    assert grads[0]._version > before


def test_a_refusal_is_not_kept_for_lists_that_look_alike() -> None:
    with fastclip.backend("triton"):
        with warnings.catch_warnings():  # of torch: nested tensors are a prototype
            warnings.simplefilter("ignore", UserWarning)
            nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(6)])
        with pytest.raises(TypeError, match="nested"):
            fastclip.get_total_norm([nested])
        assert fastclip.get_total_norm([torch.ones(9)]).item() == 3.0


def test_a_nan_of_unscaling_reaches_the_total() -> None:
    grads = [torch.tensor([math.inf, 1.0]), torch.ones(1)]
    zero = torch.tensor(0.0, dtype=F64)
    table, total, coef = backend.clip_(grads, math.inf, 1.0, zero)  # inf * 0
    assert math.isnan(table[0, 0])
    assert math.isnan(total)
    assert math.isnan(coef)


def test_negated_views_as_numbers() -> None:
    half = torch.tensor(1 - 0.5j, dtype=torch.complex128).conj().imag  # 0.5 by a flag
    assert half.is_neg()
    grads = [torch.ones(4)]
    backend.clip_(grads, 2.0, half, None)
    assert grads[0].tolist() == pytest.approx([0.25] * 4, rel=1e-6)
    backend.scale_(grads, half)
    assert grads[0].tolist() == pytest.approx([0.125] * 4, rel=1e-6)


def test_views_of_one_memory_in_other_shapes_are_two_gradients() -> None:
    grad = torch.ones(3)
    grads = [grad, grad.view(1, 3)]
    table = backend.measure(grads, 2.0, None)
    assert table[:, 0].tolist() == pytest.approx([3.0, 3.0], rel=1e-12)
    backend.scale_(grads, torch.tensor(0.5, dtype=F64))
    assert grad.tolist() == [0.25] * 3


@pytest.mark.parametrize("p", [2.0, 3.0, -math.inf])
def test_no_gradients(p: float) -> None:
    assert backend.measure([], p, None).shape == (0, 5)
    assert backend.clip_([], p, 1.0, None)[0].shape == (0, 5)


def test_coefficients_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 elements for 2 gradients"):
        backend.scale_([torch.ones(2), torch.ones(2)], torch.ones(3, dtype=F64))


def test_the_way_round_the_kernels_needs_no_gradient() -> None:
    limit = torch.tensor(1.0, requires_grad=True)
    assert not backend.clip_([torch.ones(4)], 3.0, limit, None)[2].requires_grad
