"""GradStats: every field, every method, on every backend."""

import dataclasses
import json
import math

import pytest
import torch

import fastclip
from fastclip.stats import FIELDS
from fastclip.testing import compare, reference64
from fastclip.testing.cases import CASES, Case
from tests.making import floats, grads_of, parameters, snapshot, unchanged

pytestmark = pytest.mark.usefixtures("each_backend")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF, NAN = math.inf, math.nan


def named(**grads: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    """Pairs; "__" in a keyword stands for a dot."""
    names = [name.replace("__", ".") for name in grads]
    return list(zip(names, parameters(*grads.values()), strict=True))


def sample() -> fastclip.GradStats:
    return fastclip.grad_stats(
        named(
            embed=torch.zeros(4),
            blocks__0__weight=floats(3.0, -4.0, 0.0, -0.0),
            blocks__0__bias=floats(NAN, 1.0, INF, -INF, -7.0),
            blocks__1__weight=None,
            blocks__1__bias=floats(12.0),
            head=floats(INF, 2.0),
        )
    )


def test_fields() -> None:
    stats = sample()
    assert stats.names == ("embed", "blocks.0.weight", "blocks.0.bias", "blocks.1.bias", "head")
    assert stats.numel == (4, 4, 5, 1, 2)
    assert stats.norms.tolist() == pytest.approx([0, 5, NAN, 12, INF], nan_ok=True)
    assert stats.max_abs.tolist() == [0, 4, 7, 12, 2]
    assert stats.nan_count.tolist() == [0, 0, 1, 0, 0]
    assert stats.inf_count.tolist() == [0, 0, 2, 0, 1]
    assert stats.zero_count.tolist() == [4, 2, 0, 0, 0]
    assert stats.total_norm.isnan()
    assert stats.nonfinite_count.item() == 4
    assert stats.found_inf.item() == 1.0
    assert (stats.coef.item(), stats.threshold.item()) == (1.0, INF)
    assert (stats.clipped.item(), stats.skipped.item()) == (False, False)


@pytest.mark.parametrize(("dtype", "wide"), [(BF16, F32), (F32, F32), (F64, F64)], ids=str)
def test_dtypes_and_shapes(dtype: torch.dtype, wide: torch.dtype) -> None:
    stats = fastclip.grad_stats(parameters(floats(3.0, dtype=BF16), floats(4.0, dtype=dtype)))
    fields = {
        **dict.fromkeys(("norms", "max_abs"), (wide, (2,))),
        **dict.fromkeys(("nan_count", "inf_count", "zero_count"), (torch.int64, (2,))),
        **dict.fromkeys(("total_norm", "coef", "threshold"), (wide, ())),
        **dict.fromkeys(("clipped", "skipped"), (torch.bool, ())),
        "found_inf": (F32, ()),
        "nonfinite_count": (torch.int64, ()),
    }
    for name, (expected, shape) in fields.items():
        value = getattr(stats, name)
        assert (value.dtype, tuple(value.shape)) == (expected, shape), name
    assert set(FIELDS) == {"names", "numel", *fields}
    assert stats.found_inf.item() == 0.0


@pytest.mark.parametrize("p", [2.0, 1.0, INF, 0.0, 3.0])
@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.id)
def test_rows_are_right_and_nothing_is_written(case: Case, p: float) -> None:
    params = parameters(*case.tensors())
    before = snapshot(grads_of(params))
    stats = fastclip.grad_stats(params, p)
    assert unchanged(grads_of(params), before)
    table = reference64.table(case.tensors(), p)
    assert compare.table_error(stats.table, table, case.tensors(), p) <= 1
    total = reference64.total_norm(case.tensors(), p)
    assert compare.norm_error(stats.total_norm, total, case.tensors()) <= 1


def test_unknown_names_are_positions_and_none_is_counted() -> None:
    stats = fastclip.grad_stats(parameters(floats(1.0), None, floats(2.0)))
    assert stats.names == ("0", "2")


def test_no_gradients() -> None:
    stats = fastclip.grad_stats([])
    assert (stats.names, stats.numel, stats.layers(), stats.worst()) == ((), (), [], [])
    assert (stats.total_norm.item(), stats.total_norm.dtype, stats.norms.shape) == (0.0, F32, (0,))
    assert stats.grouped().names == ()
    assert "0 gradients" in str(stats)


def test_a_norm_beyond_float32_is_not_a_nonfinite_element() -> None:
    stats = fastclip.grad_stats(parameters(floats(3e38, 3e38)))
    assert stats.total_norm.item() == INF
    assert (stats.found_inf.item(), stats.nonfinite_count.item()) == (0.0, 0)
    assert stats.nonfinite() == []


def test_layers() -> None:
    rows = sample().layers()
    assert rows[1] == fastclip.LayerStats("blocks.0.weight", 4, 5.0, 4.0, 0, 0, 2)
    assert rows[2][3:] == (7.0, 1, 2, 0)
    assert rows[2]._fields == ("name", "numel", "norm", "max_abs", "nan", "inf", "zero")
    assert [type(value) for value in rows[1]] == [str, int, float, float, int, int, int]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("norm", ["blocks.0.bias", "head", "blocks.1.bias", "blocks.0.weight", "embed"]),
        ("max_abs", ["blocks.1.bias", "blocks.0.bias", "blocks.0.weight", "head", "embed"]),
        ("nonfinite", ["blocks.0.bias", "head", "embed", "blocks.0.weight", "blocks.1.bias"]),
        ("zero", ["embed", "blocks.0.weight", "blocks.0.bias", "blocks.1.bias", "head"]),
    ],
)
def test_worst(by: str, expected: list[str]) -> None:
    """NaN before infinity before numbers; ties in list order; zeros by share, not by number."""
    stats = sample()
    assert [layer.name for layer in stats.worst(99, by=by)] == expected  # type: ignore[arg-type]
    assert [layer.name for layer in stats.worst(2, by=by)] == expected[:2]  # type: ignore[arg-type]
    assert stats.worst(0) == []
    assert len(stats.worst()) == 5


def test_worst_zero_is_a_share_of_the_elements() -> None:
    many = torch.ones(100)
    many[:10] = 0
    stats = fastclip.grad_stats(named(many=many, few=floats(0.0, 1.0), empty=torch.zeros(0)))
    assert [layer.name for layer in stats.worst(by="zero")] == ["few", "many", "empty"]


def test_worst_refuses_unknown_keys() -> None:
    with pytest.raises(ValueError, match=r"size.*|by"):
        sample().worst(by="size")  # type: ignore[arg-type]


def test_nonfinite_names() -> None:
    assert sample().nonfinite() == ["blocks.0.bias", "head"]


def test_grouped_by_depth() -> None:
    groups = sample().grouped()
    assert groups.names == ("embed", "blocks", "head")
    assert groups.numel == (4, 10, 2)
    assert groups.norms.tolist() == pytest.approx([0, NAN, INF], nan_ok=True)
    assert groups.max_abs.tolist() == [0, 12, 2]
    assert groups.nan_count.tolist() == [0, 1, 0]
    assert groups.inf_count.tolist() == [0, 2, 1]
    assert groups.zero_count.tolist() == [4, 2, 0]
    deeper = sample().grouped(depth=2)
    assert deeper.names == ("embed", "blocks.0", "blocks.1", "head")  # short names as they are
    assert sample().grouped(depth=9).names == sample().names


@pytest.mark.parametrize(
    ("p", "expected"), [(2.0, 13.0), (1.0, 19.0), (INF, 12.0), (0.0, 3.0), (-INF, 3.0)]
)
def test_grouped_norms_are_norms_of_the_group(p: float, expected: float) -> None:
    pairs = named(a__x=floats(3.0, -4.0), a__y=floats(12.0), b=floats(1.0))
    stats = fastclip.grad_stats(pairs, p)
    groups = stats.grouped()
    assert groups.norms.tolist() == pytest.approx([expected, 1.0])
    assert groups.total_norm.item() == stats.total_norm.item()


def test_grouped_by_a_function() -> None:
    groups = sample().grouped(lambda name: name.rpartition(".")[2])
    assert groups.names == ("embed", "weight", "bias", "head")
    assert groups.numel == (4, 4, 6, 2)
    assert groups.grouped(lambda name: "all").numel == (16,)


def test_as_dict_is_json() -> None:
    values = sample().as_dict()
    assert list(values) == list(FIELDS)
    assert json.loads(json.dumps(values))["numel"] == [4, 4, 5, 1, 2]
    assert values["names"][1] == "blocks.0.weight"
    assert values["zero_count"] == [4, 2, 0, 0, 0]
    assert (values["coef"], values["clipped"], values["nonfinite_count"]) == (1.0, False, 4)
    assert type(values["found_inf"]) is float
    assert type(values["clipped"]) is bool
    assert type(values["nonfinite_count"]) is int


def test_str_is_a_table() -> None:
    lines = str(sample()).splitlines()
    assert len(lines) == 2 + 5
    assert "5 gradients" in lines[0]
    assert "16 elements" in lines[0]
    assert lines[3].split() == ["blocks.0.weight", "4", "5", "4", "0", "0", "50%"]
    assert lines[4].split()[2:] == ["nan", "7", "1", "2", "0%"]


def test_str_of_many_rows_is_short_and_shows_the_worst() -> None:
    params = parameters(*(floats(float(i)) for i in range(1000)))
    text = str(fastclip.grad_stats(params))
    assert len(text.splitlines()) < 30
    assert "999" in text.splitlines()[2]


def test_immutable() -> None:
    stats = sample()
    for name in ("names", "total_norm", "coef", "table"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stats, name, None)
    with pytest.raises(AttributeError):
        stats.norms = torch.zeros(5)  # type: ignore[misc]


def test_it_does_not_change_with_the_gradients() -> None:
    params = parameters(floats(3.0, 4.0))
    stats = fastclip.grad_stats(params)
    grads_of(params)[0].fill_(100.0)
    assert (stats.norms.item(), stats.total_norm.item()) == (5.0, 5.0)


def test_cpu_of_a_host_object_is_itself() -> None:
    stats = sample()
    assert stats.cpu() is stats


def test_off_the_host_only_cpu_is_offered() -> None:
    stats = dataclasses.replace(sample(), table=torch.zeros(5, 5, dtype=F64, device="meta"))
    calls = (stats.layers, stats.worst, stats.nonfinite, stats.grouped, stats.as_dict)
    for call in calls:
        with pytest.raises(RuntimeError, match=r"\.?cpu\(\)"):
            call()
    assert "cpu()" in str(stats)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cpu_of_a_gpu_object() -> None:
    params = parameters(floats(3.0, 4.0).cuda(), floats(NAN, 0.0).cuda())
    stats = fastclip.grad_stats(params)
    assert stats.norms.device.type == "cuda"
    host = stats.cpu()
    assert host.norms.tolist() == pytest.approx([5.0, NAN], nan_ok=True)
    assert host.names == stats.names
    assert host.nan_count.tolist() == [0, 1]
