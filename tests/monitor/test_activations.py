"""ActivationWatch: what it measures, against plain float64, and what it leaves alone."""

import copy
import math
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fastclip.monitor import ActivationWatch
from fastclip.monitor.watches import outputs as outputs_module
from fastclip.monitor.watches.outputs import PENDING, ActivationStats
from tests.forbidding import MODES, NoReads


class Returning(nn.Module):
    """Puts out what it was made with, whatever comes in."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def inputs(seed: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def outputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Of each module, of the model last."""
    found = []
    for module in model:
        x = module(x)
        found.append(x.detach().clone())
    return [*found, found[-1]]


def ended(watch: ActivationWatch) -> ActivationStats:
    assert watch.take()
    return watch.stats().cpu()


def found(watch: ActivationWatch) -> dict[str, tuple[float, int, int]]:
    """Of each module the largest magnitude, NaN and infinite elements."""
    return {row.name: (row.max_abs, row.nan, row.inf) for row in ended(watch).modules()}


def expected(*tensors: Tensor) -> tuple[float, int, int]:
    """The same of some outputs, computed plainly."""
    every = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    finite = every[every.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    return largest, int(every.isnan().sum()), int(every.isinf().sum())


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


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_of_a_dtensor_what_this_process_holds(mesh: Any) -> None:
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


class Twice(nn.Module):
    """Calls one module two times, the other when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Tanhshrink()
        self.other = nn.Identity()
        self.alias = self.shared

    def forward(self, x: Tensor, other: bool = True) -> Tensor:
        x = 2 * self.shared(x)
        return self.alias(self.other(x) if other else x)


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


def test_only_passes_with_gradients_count() -> None:
    model = mlp().eval()
    watch = ActivationWatch(model)
    with torch.no_grad():
        model(inputs())
    with torch.inference_mode():
        model(inputs())
    assert watch.take() == {}
    model(inputs())
    assert watch.take().keys() == {"activation_max"}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanhshrink())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return y * math.nan


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["early-stop", "reentrant"])
def test_recomputed_modules_count_once(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    x = inputs().requires_grad_()
    x.data[0, 0] = math.nan
    rows = {
        **{"block.0": expected(model.block[0](x)), "block.1": expected(model.block(x))},
        **{"block": expected(model.block(x)), "": (0.0, 2 * x.numel() // 2, 0)},
    }
    watch = ActivationWatch(model)
    for _ in range(2):  # also in the next step
        model(x).sum().backward()
        assert found(watch) == rows


def test_every_third_step() -> None:
    model = mlp()
    watch = ActivationWatch(model, every=3)
    taken = []
    for _ in range(7):
        model(inputs())
        taken.append(bool(watch.take()))
    assert taken == [False, False, True, False, False, True, False]
    assert len(watch.stats().names) == 4


def test_some_modules_alone() -> None:
    model = mlp()
    watch = ActivationWatch(model, modules=lambda name, module: isinstance(module, nn.Linear))
    model(inputs())
    assert list(found(watch)) == ["0", "2"]


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_go_with_remove_with_the_block_and_with_the_watch() -> None:
    model = mlp()
    watch = ActivationWatch(model)
    model(inputs())
    assert hooks(model) == 4
    watch.remove()
    watch.remove()
    assert hooks(model) == 0
    assert watch.take()  # what was measured stays
    with ActivationWatch(model):
        assert hooks(model) == 4
    assert hooks(model) == 0
    gone = weakref.ref(watch := ActivationWatch(model))
    model(inputs())
    del watch
    assert (gone(), hooks(model)) == (None, 0)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_model_is_not_watched(kind: str) -> None:
    model = mlp()
    watch = ActivationWatch(model)
    again = COPIES[kind](model)
    assert torch.equal(again(inputs()), model(inputs()))
    model_alone = found(watch)
    again(10 * inputs())
    assert watch.take() == {}
    model(inputs())
    assert found(watch) == model_alone


def test_replicas_of_data_parallel_are_watched() -> None:
    model = nn.Tanhshrink()
    watch = ActivationWatch(model)
    threads = [
        threading.Thread(target=model._replicate_for_data_parallel(), args=(half,))
        for half in inputs().chunk(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(watch) == {"": expected(nn.Tanhshrink()(inputs()))}


def test_distributed_data_parallel_has_the_names_of_the_plain_model(mesh: Any) -> None:
    model = nn.parallel.DistributedDataParallel(mlp())
    watch = ActivationWatch(model)
    model(inputs())
    assert watch.take()
    assert watch.stats().names == ("0", "1", "2", "")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_are_measured_around_graph_breaks() -> None:
    model, x = mlp(), inputs()
    by_hand = [expected(y) for y in outputs(model, x)]
    watch = ActivationWatch(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), model(x).detach())
        watch.take()
        compiled(x)
        assert found(watch) == dict(zip(("0", "1", "2", ""), by_hand, strict=True))
    torch._dynamo.reset()


def test_a_compiled_block_is_chosen_whole() -> None:
    model, x = mlp(), inputs()
    model[0] = torch.compile(model[0], backend="eager", fullgraph=True)  # type: ignore[assignment]
    watch = ActivationWatch(model, modules=lambda name, module: "_orig_mod" not in name)
    model(x)
    assert found(watch)["0"] == expected(model[0](x))
    torch._dynamo.reset()


def test_transforms_of_functions_are_passed_over() -> None:
    model = nn.Linear(6, 1)
    watch = ActivationWatch(model)
    torch.func.grad(lambda x: model(x).sum())(inputs())
    torch.vmap(model)(inputs())
    assert watch.take() == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_watched_model_is_traced_and_exported_as_it_is() -> None:
    model, x = mlp(), inputs()
    watch = ActivationWatch(model)
    traced = torch.jit.trace(model, (x,))
    exported = torch.export.export(model, (x,)).module()
    assert watch.take() == {}
    assert torch.equal(traced(x), model(x))
    assert torch.equal(exported(x), model(x))
    assert "fastclip" not in str(traced.graph)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_on_the_host(mode: str) -> None:
    model = Twice()
    watch = ActivationWatch(model)
    x = inputs()
    with MODES[mode]():
        for other in (True, False):
            model(x, other)
            model(x).sum()
            taken = watch.take()
            stats = watch.stats()
            read = (stats.max_abs, stats.nonfinite_count)
    assert taken["activation_max"] == read[0].max()


def test_reads_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="reads a value"), NoReads():
        torch.ones(()).item()


def test_gradients_are_as_without() -> None:
    model, x = mlp(), inputs()
    model(x).square().sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    watch = ActivationWatch(model)
    model(x).square().sum().backward()
    assert watch.take()
    for parameter, before in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        assert before is not None
        assert torch.equal(parameter.grad, before)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        ActivationWatch([])  # type: ignore[arg-type]
    for every in (0, -1, 1.5, True):
        kind: type[Exception] = ValueError if isinstance(every, int) and every < 1 else TypeError
        with pytest.raises(kind, match=f"every must be .* at least 1, got {every}"):
            ActivationWatch(mlp(), every=every)  # type: ignore[arg-type]
    model = mlp()
    with pytest.raises(ValueError, match="modules chose none of the modules of Sequential"):
        ActivationWatch(model, modules=lambda name, module: False)
    assert hooks(model) == 0
