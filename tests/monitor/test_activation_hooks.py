"""The hooks of an ActivationWatch: which passes they count, and what they leave alone."""

import copy
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.monitor import ActivationWatch, Monitor
from tests.forbidding import MODES, NoReads
from tests.monitor.activations import (
    Twice,
    expected,
    found,
    inputs,
    mlp,
    one_of_two,
    outputs,
)


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


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_watch_measures_nothing(kind: str) -> None:
    model = mlp()
    watch = ActivationWatch(model)
    model(inputs())
    of_model = found(watch)
    again, second = COPIES[kind]((model, watch))
    again(10 * inputs())
    model(inputs())
    assert second.take() == {}
    assert second.stats().names == watch.stats().names
    second.remove()
    assert found(watch) == of_model
    monitor = copy.deepcopy(Monitor([], watches=[watch]))
    assert monitor.watches[0].take() == {}


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


def test_distributed_data_parallel_has_the_names_of_the_plain_model() -> None:
    with one_of_two():
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
