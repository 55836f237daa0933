"""AGC: norms of units, coefficients, and the rescaling of units in place."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip import GradClipper, passes
from fastclip.backends import Backend
from fastclip.backends import units as by_unit
from fastclip.gradients import Listed
from fastclip.rules import AGC, Measured, UnsuitableGradient, scale_units_
from fastclip.testing.compare import bitwise_equal
from fastclip.testing.variants import Variant
from tests import reference_rules as reference

INF, NAN = math.inf, math.nan


def seen(
    parameters: list[Tensor], gradients: list[Tensor], inv_scale: float | None = None
) -> Measured:
    norms = torch.tensor([gradient.double().norm() for gradient in gradients], dtype=torch.float64)
    scale = None if inv_scale is None else torch.tensor(inv_scale)
    return Measured(norms.norm(), norms, 0, parameters, gradients, scale)


SHAPES: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.randn(()),
    "1-D": lambda: torch.randn(17),
    "1-D-strided": lambda: torch.randn(40)[1::3],
    "2-D": lambda: torch.randn(6, 50),
    "one-row": lambda: torch.randn(1, 50),
    "one-column": lambda: torch.randn(50, 1),
    "conv": lambda: torch.randn(8, 3, 5, 5),
    "channels-last": lambda: torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(50, 6).t(),
    "permuted": lambda: torch.randn(4, 6, 5).permute(1, 2, 0),
    "misaligned": lambda: torch.randn(61)[1:].view(6, 10),
    "empty": lambda: torch.randn(0, 5),
    "rows-of-nothing": lambda: torch.randn(5, 0),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _spread(x: Tensor) -> Tensor:
    """Units of very different norms, so that some bind and some do not; strides are kept."""
    if x.dim() > 0 and x.numel() > 0:
        factor = torch.logspace(-4, 1, x.shape[0]).view(-1, *[1] * (x.dim() - 1))
        x.mul_(factor)
    return x


def _pair(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return SHAPES[kind]().to(dtype), _spread(SHAPES[kind]()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_units_one_by_one(kind: str, dtype: torch.dtype, each_backend: Variant) -> None:
    """Coefficients and clipped gradients are those of a loop over the units."""
    _require_one_by_one(kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_units_one_by_one_in_small_pieces(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(by_unit.PIECE, "cpu", 7)
    with fastclip.backend("reference"):
        _require_one_by_one(kind, dtype)


def _require_one_by_one(kind: str, dtype: torch.dtype) -> None:
    parameter, gradient = _pair(kind, dtype)
    rule, peer = AGC(clip_factor=0.1), reference.AGC(clip_factor=0.1)
    decision = rule.decide(seen([parameter], [gradient]), {})
    assert decision.units is not None
    (units,) = decision.units
    decided = torch.tensor(peer.decide(parameter, gradient), dtype=torch.float64).view(-1, 2)
    torch.testing.assert_close(units, decided[:, 0], rtol=1e-6, atol=0.0)
    lowest = decided.amin(0) if len(decided) else torch.tensor([1.0, INF])
    assert decision.coef.tolist() == pytest.approx([lowest[0].item()], rel=1e-6)
    assert decision.threshold.tolist() == pytest.approx([lowest[1].item()], rel=1e-6)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    column = units.to(wide).view(-1, *[1] * (gradient.dim() - 1)) if gradient.dim() else units[0]
    wanted = (gradient.to(wide) * column).to(dtype)
    strides = gradient.stride()
    scale_units_([gradient], decision.units)
    assert torch.equal(gradient, wanted)
    assert gradient.stride() == strides


def test_many_tensors_at_once() -> None:
    pairs = [_pair(kind, dtype) for kind in SHAPES for dtype in DTYPES]
    parameters, gradients = map(list, zip(*pairs, strict=True))
    together = AGC().decide(seen(parameters, gradients), {})
    assert together.units is not None
    for row, pair in enumerate(pairs):
        alone = AGC().decide(seen([pair[0]], [pair[1]]), {})
        assert alone.units is not None
        assert torch.equal(together.units[row], alone.units[0])
        assert together.coef[row] == alone.coef[0]
        assert together.threshold[row] == alone.threshold[0]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 65504.0),
        (torch.float16, 6e-8),
        (torch.bfloat16, 3e38),
        (torch.float32, 3e38),
        (torch.float32, 1e-40),
    ],
    ids=str,
)
def test_norms_whose_squares_no_dtype_of_theirs_holds(
    dtype: torch.dtype, value: float, each_backend: Variant
) -> None:
    x = torch.full((3, 1000), value, dtype=dtype)
    wanted = x[0, 0].double() * math.sqrt(1000)
    # float32 sums, of which float64 takes the place where they leave its range
    rtol = 1e-12 if each_backend.backend == "reference" else 6e-7
    torch.testing.assert_close(passes.unit_norms([x]), wanted.expand(3), rtol=rtol, atol=0.0)


def test_long_units(each_backend: Variant) -> None:
    """Longer than a piece, where adding in float32 would lose a percent."""
    x = torch.full((2, 9_000_000), 0.01)
    wanted = x[0, 0].double() * 3000
    rtol = 1e-9 if each_backend.backend == "reference" else 6e-7
    torch.testing.assert_close(passes.unit_norms([x]), wanted.expand(2), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_units_for_any_number_of_threads(dtype: torch.dtype, each_backend: Variant) -> None:
    """Norms and rescaled gradients are bitwise the same: of rows longer than a thread takes at a
    time, of many short ones, and of rows that lie apart."""
    if each_backend.backend != "cpu":
        pytest.skip("only the CPU kernels promise this")
    sizes = [(3, 200_001), (4000, 96), (300, 1001), (50_000, 7)]
    tensors = [torch.randn(size).to(dtype) for size in sizes]
    tensors += [torch.randn(700, 300).to(dtype).t(), torch.randn(70_000).to(dtype)]
    factors = [torch.rand(by_unit.count(x), dtype=torch.float64) for x in tensors]
    results = []
    for threads in (1, 2, 4, 3, 7):
        torch.set_num_threads(threads)
        found, _ = passes.measure_units(Listed(tensors, None), 2.0)
        assert found.unit_norms is not None
        again = [x.clone(memory_format=torch.preserve_format) for x in tensors]
        scale_units_(again, factors)
        results.append([found.unit_norms, passes.unit_norms(tensors), *again])
    for other in results[1:]:
        assert all(bitwise_equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
def test_a_table_measured_with_units(p: float, opened: Backend) -> None:
    """It is the table, in any order of the norm, with a loss scale taken out."""
    if opened.quick_measure_units is None:
        pytest.skip(f"{opened.name} does not measure units in the same read")
    tensors = [_pair(kind, dtype)[1] for kind in SHAPES for dtype in DTYPES]
    next(x for x in tensors if x.dim() == 2)[1, 3] = NAN
    inv_scale = torch.tensor(0.25, dtype=torch.float64)
    result = opened.quick_measure_units(tensors, p, inv_scale)
    assert result is not None
    table = opened.measure(tensors, p, inv_scale)
    torch.testing.assert_close(result[0], table, rtol=1e-6, atol=0.0, equal_nan=True)
    norms = torch.cat(list(map(by_unit.unit_norms, tensors)))
    torch.testing.assert_close(result[1], norms, rtol=1e-6, atol=0.0, equal_nan=True)


def test_units_that_the_kernels_do_not_take() -> None:
    """An expanded parameter, and more dimensions than they have room for, go to the reference."""
    wide = torch.randn(512).view((2,) * 9).permute(*range(8, -1, -1))[..., ::2, :]
    tensors = [torch.randn(3, 1).expand(3, 5), wide, torch.randn(2, 2)]
    wanted = torch.cat([x.flatten(1).double().norm(dim=1) for x in tensors])
    torch.testing.assert_close(passes.unit_norms(tensors), wanted, rtol=1e-6, atol=0.0)
    again = [wide.clone(memory_format=torch.preserve_format), tensors[2].clone()]
    scale_units_(again, [torch.tensor([0.5, 1.0], dtype=torch.float64)] * 2)
    for scaled, x in zip(again, tensors[1:], strict=True):
        assert torch.equal(scaled[0], x[0] / 2)
        assert torch.equal(scaled[1], x[1])


def test_a_step_reads_gradients_once(monkeypatch: pytest.MonkeyPatch, cpu_available: None) -> None:
    """Their unit norms come with the statistics; only the parameters' are asked for."""
    asked: list[int] = []
    known = passes.unit_norms

    def asking(tensors: Sequence[Tensor]) -> Tensor:
        asked.append(len(tensors))
        return known(tensors)

    monkeypatch.setattr(passes, "unit_norms", asking)
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.full((3, 4), 2.0)
    stats = GradClipper([parameter], rule=AGC()).clip_()
    assert asked == [1]
    assert stats.coef.tolist() == pytest.approx([0.005])
    assert parameter.grad.flatten().tolist() == pytest.approx([0.01] * 12)


def test_a_loss_scale_is_taken_out() -> None:
    parameter, gradient = _pair("2-D", torch.float32)
    plain = AGC().decide(seen([parameter], [gradient]), {})
    scaled = AGC().decide(seen([parameter], [gradient * 1024], 1 / 1024), {})
    assert torch.equal(plain.coef, scaled.coef)
    assert torch.equal(plain.threshold, scaled.threshold)
    assert plain.units is not None
    assert scaled.units is not None
    assert torch.equal(plain.units[0], scaled.units[0])


def test_layers_of_zeros_learn() -> None:
    """eps, not a threshold of 0, holds for them."""
    rule = AGC(clip_factor=0.01, eps=1e-3)
    decision = rule.decide(seen([torch.zeros(2, 4)], [torch.ones(2, 4)]), {})
    assert decision.coef.item() == pytest.approx(1e-5 / 2, rel=1e-12)
    assert decision.threshold.item() == pytest.approx(1e-5, rel=1e-12)
    small = rule.decide(seen([torch.zeros(2, 4)], [torch.full((2, 4), 1e-6)]), {})
    assert small.coef.item() == 1


def test_the_smallest_norm_that_is_divided_by() -> None:
    rule = AGC(clip_factor=1e-4, eps=1e-3)
    decision = rule.decide(seen([torch.zeros(4)], [torch.full((4,), 2.5e-7)]), {})
    assert decision.coef.item() == pytest.approx(1e-7 / 1e-6, rel=1e-12)


def test_units_do_not_mix() -> None:
    """A spike in one row leaves the others alone, and so does a NaN."""
    parameter, gradient = torch.ones(4, 9), torch.full((4, 9), 1e-3)
    gradient[1] = 5.0
    gradient[2, 3] = NAN
    gradient[3, 0] = INF
    (units,) = AGC().decide(seen([parameter], [gradient]), {}).units or []
    wanted = torch.tensor([1.0, 0.03 / 15, NAN, 0.0], dtype=torch.float64)
    torch.testing.assert_close(units, wanted, rtol=1e-12, atol=0.0, equal_nan=True)


UNSUITABLE: dict[str, tuple[Tensor, str]] = {
    "sparse": (torch.eye(3).to_sparse(), "has layout torch.sparse_coo"),
    "complex": (torch.ones(3, 3, dtype=torch.complex64), r"is complex \(torch.complex64\)"),
    "expanded": (torch.ones(3, 1), r"is stored in shape \(3, 1\) for .* \(3, 3\)"),
    "values-of-a-sparse-one": (torch.ones(2, 3), r"is stored in shape \(2, 3\) for .* \(3, 3\)"),
}


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_unsuitable_gradients(kind: str) -> None:
    gradient, what = UNSUITABLE[kind]
    norms = torch.ones(2, dtype=torch.float64)
    parameters = [torch.ones(3), torch.ones(3, 3)]
    at = Measured(norms.norm(), norms, 0, parameters, [torch.ones(3), gradient], None)
    with pytest.raises(
        UnsuitableGradient, match=rf"^the gradient of row 1 {what}.*AdaGC"
    ) as caught:
        AGC().decide(at, {})
    assert isinstance(caught.value, TypeError)
    assert caught.value.row == 1
    assert str(caught.value) == f"the gradient of row 1 {caught.value.reason}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_none_of_whose_units_binds_is_not_written(dtype: torch.dtype) -> None:
    gradients = [torch.full((3, 4), NAN, dtype=dtype), torch.ones(3, 4, dtype=dtype)]
    before = [gradient.clone() for gradient in gradients]
    versions = [gradient._version for gradient in gradients]
    ones = torch.ones(3, dtype=torch.float64)
    scale_units_(gradients, [ones, torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)])
    assert bitwise_equal(gradients[0], before[0])
    assert gradients[0]._version == versions[0]
    assert gradients[1]._version > versions[1]
    assert torch.equal(gradients[1][0::2], before[1][0::2])
    assert torch.equal(gradients[1][1], before[1][1] / 2)


def test_half_types_are_rounded_once() -> None:
    gradient = torch.arange(1, 2001, dtype=torch.float16).view(2, 1000)
    wanted = (gradient.double() * torch.tensor([[1 / 3], [0.7]]).double()).half()
    scale_units_([gradient], [torch.tensor([1 / 3, 0.7], dtype=torch.float64)])
    # of float32 products, which are the float64 ones but for a tie in a million
    assert (gradient != wanted).sum() <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_negated_view_keeps_its_sign(dtype: torch.dtype) -> None:
    memory = torch.full((2, 3), 2.0, dtype=dtype)
    view = torch._neg_view(memory)
    assert view.is_neg()
    scale_units_([view], [torch.tensor([0.5, 0.25], dtype=torch.float64)])
    assert memory.tolist() == [[1.0] * 3, [0.5] * 3]
    assert view.tolist() == [[-1.0] * 3, [-0.5] * 3]


def test_names_need_not_be_distinct() -> None:
    """There is no state to be kept by them."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter, size in zip(parameters, (1.0, 0.001), strict=True):
        parameter.grad = torch.full((2,), size)
    stats = GradClipper([("w", parameter) for parameter in parameters], rule=AGC()).clip_()
    assert stats.names == ("w", "w")
    assert stats.coef.tolist() == pytest.approx([0.01, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 9, 32, 96, 127, 128, 768, 3072, 6016])
@pytest.mark.parametrize(
    "values", ["normal", "equal", "zeros", "tiny", "denormal", "huge", "one-huge", "nan", "inf"]
)
def test_unit_norms_of_rows(
    values: str, width: int, dtype: torch.dtype, each_backend: Variant
) -> None:
    x = torch.randn(9, width)
    if values == "equal":
        x.fill_(0.1)
    if values in ("tiny", "denormal", "huge"):
        x *= {"tiny": 1e-22, "denormal": 1e-42, "huge": 1e25}[values]
    x[3] = 0
    if values == "zeros":
        x[::2] = 0
    if values in ("one-huge", "nan", "inf"):
        x[4, width // 2] = {"one-huge": 3e38, "nan": math.nan, "inf": math.inf}[values]
    if dtype == torch.float16 and values in ("huge", "one-huge"):
        x = x.nan_to_num().clamp(-65504, 65504)
    x = x.to(dtype)
    expected = x.to(torch.float64).square().sum(1).sqrt()
    norms = passes.unit_norms([x])
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0, equal_nan=True)
    conv = x.view(9, 1, width, 1)
    assert torch.equal(passes.unit_norms([conv]).nan_to_num(7.0), norms.nan_to_num(7.0))
