"""clip_grad_norm_ and its parts: one test for each thing the documentation promises."""

import math
import subprocess
import sys
import warnings

import pytest
import torch

import fastclip
from fastclip.testing import compare, reference64
from fastclip.testing.cases import CASES, Case
from fastclip.testing.variants import Variant
from tests.making import floats, grads_of, parameters, snapshot, unchanged

pytestmark = pytest.mark.usefixtures("each_backend")

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
C64, C128 = torch.complex64, torch.complex128
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([F32], F32),
        ([BF16], F32),
        ([F16], F32),
        ([C64], F32),
        ([F64], F64),
        ([C128], F64),
        ([BF16, F64, F16], F64),
        ([F32, C128], F64),
        ([BF16, F32], F32),
    ],
    ids=str,
)
def test_the_result_is_never_rounded_to_a_half_type(
    dtypes: list[torch.dtype], expected: torch.dtype
) -> None:
    params = parameters(*(floats(3.0, 4.0, dtype=dtype) for dtype in dtypes))
    norm = fastclip.clip_grad_norm_(params, 1.0)
    assert norm.dtype == expected
    assert norm.shape == ()
    assert norm.device == params[0].device
    assert norm.item() == pytest.approx(5 * math.sqrt(len(dtypes)), rel=1e-6)


def test_a_float16_norm_beyond_float16() -> None:
    params = parameters(torch.full((1000,), 3000.0, dtype=F16))
    norm = fastclip.clip_grad_norm_(params, 1.0)
    assert norm.item() == pytest.approx(3000 * math.sqrt(1000), rel=1e-6)  # torch: inf, all zeros
    assert grads_of(params)[0].double().norm().item() == pytest.approx(1, rel=2**-10)


@pytest.mark.parametrize("params", [[], parameters(None, None)], ids=["empty", "all-None"])
def test_no_gradients(params: list[torch.Tensor]) -> None:
    for norm in (
        fastclip.clip_grad_norm_(params, 1.0),
        fastclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True),
        fastclip.clip_grad_norm_(params, 1.0, norm_type=INF),
        fastclip.get_total_norm(grads_of(params)),
    ):
        assert (norm.item(), norm.dtype, norm.device.type) == (0.0, F32, "cpu")
    fastclip.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0))
    fastclip.clip_grad_value_(params, 1.0)


def test_an_exhausted_generator_warns() -> None:
    with pytest.warns(UserWarning, match="generator"):
        norm = fastclip.clip_grad_norm_((p for p in parameters()), 1.0)
    assert norm.item() == 0.0


def test_a_generator_is_read_once() -> None:
    params = parameters(floats(3.0), floats(4.0))
    assert fastclip.clip_grad_norm_((p for p in params), 1.0).item() == 5.0
    assert [g.item() for g in grads_of(params)] == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize(
    ("grads", "max_norm", "expected"),
    [
        ([3.0, 4.0], 1.0, [3 / 5.000001, 4 / 5.000001]),
        ([3.0, 4.0], 5.0, [3 * 5 / 5.000001, 4 * 5 / 5.000001]),
        ([1e-8], 1e-8, [1e-8 * 1e-8 / 1.01e-6]),
    ],
)
def test_the_coefficient(grads: list[float], max_norm: float, expected: list[float]) -> None:
    params = parameters(*(floats(g, dtype=F64) for g in grads))
    fastclip.clip_grad_norm_(params, max_norm)
    assert [g.item() for g in grads_of(params)] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_gradients_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    before = torch.randn(5000).to(dtype)
    params = parameters(before.clone())
    norm = fastclip.clip_grad_norm_(params, 1.0)
    coef = (1 / (norm.double() + 1e-6)).float()
    assert bool(torch.equal(grads_of(params)[0], (before.float() * coef).to(dtype)))


def test_a_coefficient_of_one_changes_nothing() -> None:
    grads = [floats(3.0, -0.0, 1e-44), floats(4.0, dtype=BF16)]
    before = snapshot(grads)
    norm = fastclip.clip_grad_norm_(parameters(*grads), 100.0)
    assert norm.item() == 5.0
    assert unchanged(grads, before)


READ_ONLY = """
import mmap, sys, tempfile, warnings
import torch, fastclip
with tempfile.TemporaryFile() as file:
    file.write(torch.ones(4096).numpy().tobytes())
    file.flush()
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    warnings.simplefilter("ignore", UserWarning)  # torch warns of the very thing that is meant here
    grad = torch.frombuffer(memory, dtype=torch.float32)
p = torch.zeros(4096, requires_grad=True)
p.grad = grad
for max_norm in (65.0, float("inf"), torch.tensor(float("inf")), torch.tensor(65.0)):
    with fastclip.backend(sys.argv[1]):
        assert fastclip.clip_grad_norm_(p, max_norm).item() == 64.0
        fastclip.clip_grads_with_norm_(p, max_norm, torch.tensor(64.0))
print("never written", flush=True)
with fastclip.backend(sys.argv[1]):
    fastclip.clip_grad_norm_(p, 1.0)  # the memory is read-only indeed: this write must crash
print("survived a write")
"""


def test_a_coefficient_of_one_writes_nothing(each_backend: Variant) -> None:
    if each_backend.device != "cpu" or each_backend.simd not in (None, "avx512"):
        pytest.skip("one run per CPU backend is enough")
    run = subprocess.run(
        [sys.executable, "-c", READ_ONLY, each_backend.backend],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == "never written\n", run.stderr
    assert run.returncode < 0  # killed by the signal


@pytest.mark.parametrize("max_norm", [INF, torch.tensor(INF), torch.tensor([INF], dtype=F64)])
@pytest.mark.parametrize("value", [2.0, 3e38, INF, NAN])
def test_an_infinite_max_norm_only_measures(max_norm: float | torch.Tensor, value: float) -> None:
    grads = [floats(value, value), floats(1.0, dtype=BF16)]
    before = snapshot(grads)
    norm = fastclip.clip_grad_norm_(parameters(*grads), max_norm)
    expected = {2.0: 3.0, 3e38: INF, INF: INF, NAN: NAN}[value]
    assert norm.item() == pytest.approx(expected, nan_ok=True)
    fastclip.clip_grads_with_norm_(parameters(*grads), max_norm, norm)
    assert unchanged(grads, before)


@pytest.mark.parametrize(
    "max_norm", [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1.0, dtype=F64)], ids=str
)
def test_a_tensor_max_norm(max_norm: torch.Tensor) -> None:
    params = parameters(floats(3.0, 4.0))
    assert fastclip.clip_grad_norm_(params, max_norm).item() == 5.0
    assert grads_of(params)[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_a_tensor_max_norm_is_not_checked() -> None:
    params = parameters(floats(3.0, 4.0))
    fastclip.clip_grad_norm_(params, torch.tensor(-5.000001, dtype=F64))
    assert grads_of(params)[0].tolist() == pytest.approx([-3.0, -4.0], rel=1e-6)
    fastclip.clip_grad_norm_(params, torch.tensor(NAN))
    assert grads_of(params)[0].isnan().all()


def test_max_norm_zero() -> None:
    params = parameters(floats(3.0, -4.0), floats(1.0, dtype=F16))
    assert fastclip.clip_grad_norm_(params, 0).item() == pytest.approx(math.sqrt(26), rel=1e-6)
    assert [g.tolist() for g in grads_of(params)] == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize(
    ("norm_type", "expected"),
    [
        (2, 13.0),
        ("2", 13.0),
        (1.0, 19.0),
        (INF, 12.0),
        ("inf", 12.0),
        (-INF, 0.0),
        ("-inf", 0.0),
        (0, 3.0),
        (3, (27 + 64 + 1728) ** (1 / 3)),
        (0.5, (math.sqrt(3) + 2 + math.sqrt(12)) ** 2),
        (-1, 0.0),
        (200, 12.0),  # 12**200 is 1e215
    ],
)
def test_norm_types(norm_type: float | str, expected: float) -> None:
    """As if all gradients were one vector: for p = 0 that is not the norm of the norms."""
    grads = [floats(3.0, 0.0), floats(-4.0, dtype=BF16), floats(12.0), floats(dtype=F16)]
    for norm in (
        fastclip.get_total_norm(grads, norm_type),
        fastclip.clip_grad_norm_(parameters(*grads), INF, norm_type),
        fastclip.grad_stats(parameters(*grads), norm_type).total_norm,
    ):
        assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_negative_norm_types_without_zeros() -> None:
    grads = [floats(3.0, -6.0), floats(2.0)]
    assert fastclip.get_total_norm(grads, -1).item() == pytest.approx(1.0, rel=1e-6)
    assert fastclip.get_total_norm(grads, -INF).item() == 2.0
    assert fastclip.get_total_norm([*grads, floats(NAN)], -INF).isnan()


def test_gradients_without_elements() -> None:
    for empties in ([torch.zeros(0)], [torch.zeros(3, 0), torch.zeros(0)]):
        for p in (0, 0.5, 1, 2, 3, INF):
            assert fastclip.get_total_norm(empties, p).item() == 0.0  # torch: RuntimeError for inf
        for p in (-1, -INF):
            assert fastclip.get_total_norm(empties, p).item() == INF
        assert fastclip.clip_grad_norm_(parameters(*empties), 1.0).item() == 0.0


def test_a_power_beyond_float64_is_inf() -> None:
    params = parameters(floats(100.0))
    norm = fastclip.clip_grad_norm_(params, 1.0, norm_type=200, error_if_nonfinite=True)
    assert norm.item() == INF  # finite gradients never raise
    assert grads_of(params)[0].item() == 0.0


def test_an_infinite_element() -> None:
    params = parameters(floats(1.0, INF, -2.0), floats(3.0, dtype=BF16))
    assert fastclip.clip_grad_norm_(params, 1.0).item() == INF
    first, second = (g.tolist() for g in grads_of(params))
    assert math.isnan(first[1])
    assert [first[0], first[2], second[0]] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("norm_type", [2, 1, INF, 0.5, -INF])
def test_a_nan_element(norm_type: float) -> None:
    params = parameters(floats(1.0, NAN, INF), floats(3.0, dtype=BF16))
    assert fastclip.clip_grad_norm_(params, 1.0, norm_type).isnan()
    assert all(g.isnan().all() for g in grads_of(params))


def test_a_norm_beyond_float32() -> None:
    params = parameters(*(floats(3e38) for _ in range(4)))
    norm = fastclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert norm.item() == INF
    expected = [0.5] * 4  # torch: zeros
    assert [g.item() for g in grads_of(params)] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("listed", ["twice", "tied", "same-memory"])
def test_the_same_gradient_reached_twice(listed: str) -> None:
    grad = floats(3.0, 4.0)
    params = parameters(grad)
    if listed == "twice":
        params = [*params, *params]
    elif listed == "tied":  # two parameters that share one gradient tensor
        params = parameters(grad, grad)
    else:
        params = parameters(grad, grad.view(2))
    assert fastclip.get_total_norm([p.grad for p in params]).item() == 5.0
    assert fastclip.grad_stats(params).total_norm.item() == 5.0
    assert fastclip.clip_grad_norm_(params, 1.0).item() == 5.0  # torch: 7.07, scaled twice
    assert grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    fastclip.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0))
    assert grad.tolist() == pytest.approx([0.3, 0.4], rel=1e-5)


def test_different_views_of_one_memory_are_different_gradients() -> None:
    memory = floats(3.0, 4.0, 12.0)
    assert fastclip.get_total_norm([memory[:1], memory[1:2], memory[2:]]).item() == 13.0


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.functional], ids=lambda case: case.id
)
@pytest.mark.parametrize("p", [0, 1, 2, 3, INF])
def test_sparse_and_expanded(case: Case, p: float) -> None:
    grads = case.tensors()
    total = reference64.total_norm(grads, p)
    before = [reference64.elements(g) for g in case.tensors()]
    params = parameters(*grads)
    norm = fastclip.clip_grad_norm_(params, total / 2, p)
    assert compare.norm_error(norm, total, grads) <= 1
    want = reference64.coefficient(total, total / 2)
    for param, old, grad in zip(params, before, grads, strict=True):
        assert param.grad is grad  # in place
        share = compare.norm_tolerance(grads)
        assert compare.scale_error(_values(grad), old.to(grad.dtype), want, share) <= 1


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def test_sparse_is_coalesced_only_when_rescaled() -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 4]]), floats(1.0, 2.0, 4.0), (6,), check_invariants=True
    )
    params = parameters(grad)
    assert fastclip.clip_grad_norm_(params, 10.0).item() == 5.0  # 1 + 2 add up before the square
    assert not grad.is_coalesced()
    assert grad._values().tolist() == [1.0, 2.0, 4.0]
    stats = fastclip.grad_stats(params)
    assert (stats.numel, stats.max_abs.tolist()) == ((2,), [4.0])  # what is stored counts
    assert fastclip.clip_grad_norm_(params, 2.5).item() == 5.0
    assert params[0].grad is grad
    assert grad.to_dense().tolist() == pytest.approx([0, 1.5, 0, 0, 2, 0], rel=1e-6)


@pytest.mark.parametrize("dtype", [C64, C128])
def test_complex(dtype: torch.dtype) -> None:
    grad = torch.tensor([3 + 4j, 0j, -12j], dtype=dtype)
    assert fastclip.get_total_norm([grad]).item() == 13.0
    assert fastclip.get_total_norm([grad], INF).item() == 12.0
    assert fastclip.get_total_norm([grad], 0).item() == 2.0
    fastclip.clip_grad_norm_(parameters(grad), 6.5)
    expected = torch.tensor([1.5 + 2j, 0, -6j], dtype=dtype)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


def test_complex_infinite_part_wins_over_nan() -> None:
    stats = fastclip.grad_stats(parameters(torch.tensor([complex(INF, NAN), complex(NAN, 1), 5j])))
    assert (stats.inf_count.item(), stats.nan_count.item()) == (1, 1)
    assert stats.max_abs.item() == 5.0


@pytest.mark.parametrize("shape", [(3, 4), (12,)])
def test_an_expanded_gradient_is_scaled_once(shape: tuple[int, ...]) -> None:
    storage = floats(2.0)
    params = parameters(storage.expand(shape))
    assert fastclip.clip_grad_norm_(params, 1.0).item() == pytest.approx(math.sqrt(48), rel=1e-6)
    assert storage.item() == pytest.approx(2 / math.sqrt(48), rel=2e-6)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_has_no_effect(foreach: bool | None) -> None:
    params = parameters(floats(3.0, 4.0))
    assert fastclip.clip_grad_norm_(params, 2.5, 2.0, False, foreach).item() == 5.0
    assert fastclip.get_total_norm(grads_of(params), foreach=foreach).item() == pytest.approx(2.5)
    fastclip.clip_grads_with_norm_(params, 1.25, torch.tensor(2.5), foreach=foreach)
    fastclip.clip_grad_value_(params, 0.9, foreach=foreach)
    assert grads_of(params)[0].tolist() == pytest.approx([0.75, 0.9], rel=1e-5)


def test_get_total_norm_takes_the_tensors_themselves() -> None:
    tensors = [floats(3.0), None, floats(4.0)]
    assert fastclip.get_total_norm(tensors).item() == 5.0
    assert fastclip.get_total_norm(floats(3.0, 4.0)).item() == 5.0
    assert fastclip.get_total_norm(t for t in tensors).item() == 5.0
    assert fastclip.get_total_norm(tensors, error_if_nonfinite=True).item() == 5.0


@pytest.mark.parametrize(
    ("total", "expected"),
    [(5.0, [0.6, 0.8]), (0.5, [3.0, 4.0]), (INF, [0.0, 0.0]), (NAN, [NAN, NAN])],
)
def test_clip_grads_with_norm(total: float, expected: list[float]) -> None:
    for dtype in (F32, F64):
        params = parameters(floats(3.0, 4.0))
        fastclip.clip_grads_with_norm_(params, 1.0, torch.tensor(total, dtype=dtype))
        assert grads_of(params)[0].tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in CASES[::10]:
            fastclip.clip_grad_norm_(parameters(*case.tensors()), 1.0)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grads_with_norm_"])
def test_autograd_notices_a_changed_gradient(clip: str) -> None:
    """A gradient saved for a second derivative must not be used after it was rescaled."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    with warnings.catch_warnings():  # of torch, about a cycle of references
        warnings.simplefilter("ignore", UserWarning)
        x.grad = gradient
    penalty = (gradient**2).sum()
    before = gradient._version
    fastclip.clip_grad_norm_([x], 1e9)  # not clipped, not written
    assert gradient._version == before
    if clip == "clip_grad_norm_":
        fastclip.clip_grad_norm_([x], 1.0)
    else:
        fastclip.clip_grads_with_norm_([x], 1.0, 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(penalty, x)
    x.grad = None
