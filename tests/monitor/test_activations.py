"""ActivationWatch: what it measures, against plain float64, and what it leaves alone."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastclip.monitor import ActivationWatch
from fastclip.monitor.watches import outputs as outputs_module
from fastclip.monitor.watches.outputs import PENDING, ActivationStats
from tests.monitor.activations import (
    Returning,
    Twice,
    ended,
    expected,
    found,
    inputs,
    mlp,
    one_of_two,
    outputs,
)


def test_every_module_is_measured_innermost_first() -> None:
    model, x = mlp(), inputs()
    by_hand = outputs(model, x)
    watch = ActivationWatch(model)
    model(x)
    taken = watch.take()
    assert taken.keys() == {"activation_max"}
    assert (taken["activation_max"].shape, taken["activation_max"].dtype) == ((), torch.float32)
    assert float(taken["activation_max"]) == max(float(y.abs().max()) for y in by_hand)
    stats = watch.stats()
    assert stats.names == ("0", "1", "2", "")
    assert stats.max_abs.tolist() == [float(y.abs().max()) for y in by_hand]
    assert stats.nonfinite_count.tolist() == [0, 0, 0, 0]
    assert (stats.max_abs.dtype, stats.nonfinite_count.dtype) == (torch.float32, torch.int64)
    assert repr(stats) == "<ActivationStats of 4 modules on cpu>"


BAD = {
    "nan": ([1.0, math.nan, -3.0], math.nan),
    "inf": ([1.0, math.inf, -3.0], math.inf),
    "minus-inf": ([1.0, -math.inf, -3.0], math.inf),
    "both": ([math.inf, math.nan, -math.inf], math.nan),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_finite_shows_in_the_maximum_and_is_counted(kind: str) -> None:
    values, largest = BAD[kind]
    model = nn.Sequential(nn.Identity(), nn.ReLU6())
    watch = ActivationWatch(model)
    x = torch.tensor(values)
    model(x)
    assert float(watch.take()["activation_max"]) == pytest.approx(largest, nan_ok=True)
    stats = watch.stats().cpu()
    rows = {row.name: tuple(row[1:]) for row in stats.modules()}
    assert rows == {"0": expected(x), "1": expected(nn.ReLU6()(x)), "": expected(nn.ReLU6()(x))}
    assert stats.nonfinite()[0] == "0"
    assert stats.nonfinite_count.tolist()[0] == sum(expected(x)[1:])


def test_the_worst_modules() -> None:
    model = nn.Sequential(
        OrderedDict(
            a=Returning(torch.tensor([1.0, math.nan])),
            b=Returning(torch.tensor([5.0, math.inf, math.nan])),
            c=Returning(torch.tensor([-7.0])),
            d=Returning(torch.tensor([7.0])),
        )
    )
    watch = ActivationWatch(model, modules=lambda name, module: name != "")
    model(torch.ones(1))
    stats = ended(watch)
    assert [row.name for row in stats.worst(3)] == ["c", "d", "b"]
    assert [row.name for row in stats.worst(2, by="nonfinite")] == ["b", "a"]
    assert stats.nonfinite() == ["a", "b"]
    with pytest.raises(ValueError, match="by must be one of 'max_abs', 'nonfinite', got 'norm'"):
        stats.worst(by="norm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        stats.worst(-1)


def test_statistics_on_a_device_are_not_read_in_passing() -> None:
    stats = ActivationStats(("a",), torch.zeros(1, 5, device="meta"), torch.float32)
    for read in (stats.modules, stats.worst, stats.nonfinite):
        with pytest.raises(RuntimeError, match=r"on meta, .* call it on stats.cpu\(\)"):
            read()


DTYPES = {
    **{str(dtype)[6:]: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    **{"float64": torch.float64, "float8": torch.float8_e4m3fn},
}


@pytest.mark.parametrize("name", DTYPES)
def test_floating_dtypes(name: str) -> None:
    values = torch.tensor([0.5, -3.0, 2.5, math.nan]).to(DTYPES[name])
    model = Returning(values)
    watch = ActivationWatch(model)
    model(torch.ones(1))
    assert found(watch) == {"": (3.0, 1, 0)}
    wide = name == "float64"
    assert watch.stats().max_abs.dtype == (torch.float64 if wide else torch.float32)


def test_float64_keeps_its_range() -> None:
    model = Returning(torch.tensor([1e300], dtype=torch.float64))
    watch = ActivationWatch(model)
    model(torch.ones(1))
    assert float(watch.take()["activation_max"]) == 1e300


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None


class Mapped(OrderedDict[str, Any]):
    """As the outputs of transformers are."""


class Labelled(Tensor):
    """A subclass that only adds methods."""


COO = torch.sparse_coo_tensor(
    torch.tensor([[1, 1]]), torch.tensor([2.0, -5.0]), (4,), check_invariants=True
)
ONE, BIG = torch.tensor([1.0, -2.0]), torch.tensor([[math.inf, 9.0]])
OUTPUTS: dict[str, tuple[Any, tuple[float, int, int]]] = {
    "tuple": ((ONE, BIG), (9.0, 0, 1)),
    "list-in-dict": ({"x": [ONE, (BIG,)]}, (9.0, 0, 1)),
    "mapping": (Mapped(logits=BIG, past=None, hidden=(ONE, ONE)), (9.0, 0, 1)),
    "dataclass": (Output(BIG, None), (9.0, 0, 1)),
    "integers-beside": ((ONE, torch.tensor([7]), torch.tensor(True), "x"), (2.0, 0, 0)),
    "complex": (torch.tensor([3 + 4j, complex(math.nan, 1)]), (5.0, 1, 0)),
    "sparse": (COO, (5.0, 0, 0)),
    "subclass": (ONE.as_subclass(Labelled), (2.0, 0, 0)),
    "parameter": (nn.Parameter(ONE), (2.0, 0, 0)),
    "expanded": (torch.tensor(math.nan).expand(3, 2), (0.0, 6, 0)),
    "transposed": (torch.arange(6.0).view(2, 3).t()[1:, ::2], (2.0, 0, 0)),
    "overlapping": (torch.arange(5.0).unfold(0, 3, 1), (4.0, 0, 0)),
    "empty": (torch.empty(0, 3), (0.0, 0, 0)),
    "0-d": (torch.tensor(-6.0), (6.0, 0, 0)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_every_kind(kind: str) -> None:
    output, row = OUTPUTS[kind]
    model = Returning(output)
    watch = ActivationWatch(model)
    assert model(torch.ones(1)) is output
    assert found(watch) == {"": row}


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


NOTHING: dict[str, Any] = {
    "integers": torch.tensor([7]),
    "none": None,
    "meta": torch.ones(2, device="meta"),
    "fake": fake(),
    "other": object(),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_outputs_without_numbers_are_passed_over(kind: str) -> None:
    model = Returning(NOTHING[kind])
    watch = ActivationWatch(model)
    model(torch.ones(1))
    assert watch.take() == {}
    with pytest.raises(RuntimeError, match="no activations were measured"):
        watch.stats()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested(layout: torch.layout) -> None:
    parts = [torch.ones(2, 3), torch.full((4, 3), -2.0)]
    model = Returning(torch.nested.nested_tensor(parts, layout=layout))
    watch = ActivationWatch(model)
    model(torch.ones(1))
    assert found(watch) == {"": (2.0, 0, 0)}


class Opaque(Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls) -> "Opaque":
        return Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_an_output_that_cannot_be_measured_is_an_error_with_the_way_out() -> None:
    model = nn.Sequential(OrderedDict(odd=Returning(Opaque())))
    watch = ActivationWatch(model)
    with pytest.raises(TypeError, match=r"'odd' returned a Opaque, .* leave it out with"):
        model(torch.ones(1))
    watch.remove()
    csr = torch.eye(2).to_sparse_csr()
    model = nn.Sequential(OrderedDict(odd=Returning(csr)))
    watch = ActivationWatch(model)
    with pytest.raises(TypeError, match=r"'odd' returned a tensor of layout torch.sparse_csr"):
        model(torch.ones(1))
    watch.remove()


def test_of_a_dtensor_what_this_process_holds() -> None:
    with one_of_two():
        mesh = init_device_mesh("cpu", (2,))
        model = Returning(DTensor.from_local(ONE, mesh, [Shard(0)], run_check=False))
        watch = ActivationWatch(model)
        model(torch.ones(1))
        assert found(watch) == {"": (2.0, 0, 0)}


def test_forward_passes_of_one_step_are_put_together() -> None:
    """As in gradient accumulation."""
    model = mlp()
    batches = [inputs(seed, rows) for seed, rows in enumerate((5, 3, 7))]
    batches[1][0, 0] = math.nan
    by_hand = [
        expected(*calls) for calls in zip(*(outputs(model, x) for x in batches), strict=True)
    ]
    watch = ActivationWatch(model)
    for x in batches:
        model(x)
    taken = watch.take()
    assert math.isnan(taken["activation_max"])
    rows = {row.name: (row.max_abs, row.nan, row.inf) for row in watch.stats().cpu().modules()}
    assert rows == dict(zip(("0", "1", "2", ""), by_hand, strict=True))
    assert watch.take() == {}
    model(batches[0])
    assert found(watch)["0"] == expected(model[0](batches[0]))


def test_a_shared_module_has_one_row_for_all_calls() -> None:
    model, x = Twice(), inputs()
    first = nn.Tanhshrink()(x)
    second = nn.Tanhshrink()(2 * first)
    watch = ActivationWatch(model)
    model(x, other=False)
    model(x)
    shared = expected(first, second, first, second)
    assert found(watch) == {
        "shared": shared,
        "other": expected(2 * first),
        "": expected(second),
    }


def test_many_calls_take_little_memory_and_lose_nothing() -> None:
    model = Returning(torch.tensor([1.0]))
    watch = ActivationWatch(model)
    for number in range(2 * PENDING + 10):
        model.output = torch.tensor([float(number), math.inf])
        model(torch.ones(1))
        assert len(watch._outputs._tables) <= PENDING
    assert found(watch) == {"": (2 * PENDING + 9.0, 0, 2 * PENDING + 10)}


def test_what_is_changed_in_place_later_counts_as_it_was() -> None:
    model = nn.Sequential(nn.Identity(), nn.Threshold(0.0, 50.0, inplace=True))
    watch = ActivationWatch(model)
    model(torch.tensor([-3.0, 2.0]))
    assert found(watch) == {"0": (3.0, 0, 0), "1": (50.0, 0, 0), "": (50.0, 0, 0)}


def test_one_tensor_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    held = outputs_module._held

    def counted(tensor: Tensor, name: str) -> Tensor | None:
        reads.append(name)
        return held(tensor, name)

    monkeypatch.setattr(outputs_module, "_held", counted)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 2), nn.Identity()))
    watch = ActivationWatch(model)
    model(inputs())
    assert reads == ["0.0"]
    assert len(set(found(watch).values())) == 1
    assert len(watch.stats().names) == 4
