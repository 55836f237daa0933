"""ParameterWatch: norms and update ratios against plain float64, and blocks that go wrong."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastclip
from fastclip.monitor import ParameterWatch
from tests.forbidding import MODES

CLOSE = 1e-6  # relative; what norms are promised


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def with_gradients(model: nn.Module, seed: int = 1) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
    return model


def copies(parameters: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    wide = {name: each.detach().clone().to_dense() for name, each in parameters}
    return {
        name: each.to(torch.complex128 if each.is_complex() else torch.float64)
        for name, each in wide.items()
    }


def norm(tensors: dict[str, Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in tensors.values()))


def expected(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Any]:
    """In float64, computed plainly."""
    update = {name: after[name] - before[name] for name in before}
    ratios = [norm({name: update[name]}) / norm({name: before[name]}) for name in before]
    return {
        "param_norm": norm(after),
        "update_ratio": norm(update) / norm(before),
        "names": tuple(before),
        "param_norms": [norm({name: each}) for name, each in after.items()],
        "update_ratios": ratios,
    }


def plain(taken: dict[str, Any]) -> dict[str, Any]:
    assert taken.keys() == {"param_norm", "update_ratio", "layers"}
    names, columns = taken["layers"]
    return {
        "param_norm": taken["param_norm"].item(),
        "update_ratio": taken["update_ratio"].item(),
        "names": names,
        "param_norms": columns["param_norm"].tolist(),
        "update_ratios": columns["update_ratio"].tolist(),
    }


def close(taken: dict[str, Any], by_hand: dict[str, Any]) -> bool:
    numbers = plain(taken)
    assert numbers.pop("names") == by_hand["names"]
    return all(value == pytest.approx(by_hand[key], rel=CLOSE) for key, value in numbers.items())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_norms_and_ratios_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    model = with_gradients(net(dtype))
    optimizer = OPTIMIZERS[name](model.parameters())
    watch = ParameterWatch(model, every=1)
    before = copies(list(model.named_parameters()))
    with watch:
        optimizer.step()
    taken = watch.take()
    by_hand = expected(before, copies(list(model.named_parameters())))
    assert by_hand["update_ratio"] > 0
    assert close(taken, by_hand)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = (taken["param_norm"], taken["update_ratio"], *taken["layers"].columns.values())
    assert {tensor.dtype for tensor in tensors} == {wide}
    assert taken["param_norm"].shape == taken["update_ratio"].shape == ()
    assert watch.take() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_difference_is_not_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    """Of numbers that change their magnitude it needs more digits than they have."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 1001).to(dtype))
    watch = ParameterWatch([("w", parameter)], every=1)
    before = copies([("w", parameter)])
    with watch:
        parameter.data.mul_(0.123).add_(1e-3)
    assert close(watch.take(), expected(before, copies([("w", parameter)])))


def test_every_third_block() -> None:
    model = with_gradients(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ParameterWatch(model, every=3)
    taken = []
    for _ in range(7):
        with watch:
            optimizer.step()
        taken.append(bool(watch.take()))
    assert taken == [False, False, True, False, False, True, False]


def test_the_copy_is_there_only_within_a_block_that_measures() -> None:
    model = with_gradients(net())
    watch = ParameterWatch(model, every=2)
    held = []
    for _ in range(2):
        with watch:
            held.append(watch._before is not None)
        assert watch._before is None
    assert held == [False, True]
    with watch, pytest.raises(RuntimeError, match="open already; one block goes around all"):
        watch.__enter__()


def test_an_exception_reports_nothing_and_frees_the_copy() -> None:
    model = with_gradients(net())
    watch = ParameterWatch(model, every=1)
    with pytest.raises(ZeroDivisionError), watch:
        _ = 1 / 0
    assert watch._before is None
    assert watch.take() == {}
    with watch:
        pass
    assert float(watch.take()["update_ratio"]) == 0


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_skipped_step_is_an_update_of_nothing(fused: bool) -> None:
    model = with_gradients(net())
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[0, 0] = math.inf
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    clipper = fastclip.GradClipper(model, 1.0)
    watch = ParameterWatch(model, every=1)
    with watch:
        stats = clipper.step(optimizer)
    taken = watch.take()
    assert bool(stats.skipped)
    assert plain(taken)["update_ratios"] == [0, 0, 0, 0]
    assert float(taken["update_ratio"]) == 0
    assert float(taken["param_norm"]) == pytest.approx(
        norm(copies(list(model.named_parameters()))), rel=CLOSE
    )


@pytest.mark.parametrize("overflows", [False, True], ids=["steps", "skips"])
def test_a_scaler(overflows: bool) -> None:
    model = with_gradients(net())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= math.inf if overflows else 1024.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    clipper = fastclip.GradClipper(model, 1.0)
    watch = ParameterWatch(model, every=1)
    before = copies(list(model.named_parameters()))
    with watch:
        clipper.step(optimizer, scaler)
    by_hand = expected(before, copies(list(model.named_parameters())))
    assert (by_hand["update_ratio"] == 0) == overflows
    assert close(watch.take(), by_hand)


def test_two_optimizers_in_one_block() -> None:
    model = with_gradients(net())
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.1)]
    watch = ParameterWatch(model, every=1)
    before = copies(list(model.named_parameters()))
    with watch:
        for optimizer in optimizers:
            optimizer.step()
    assert close(watch.take(), expected(before, copies(list(model.named_parameters()))))


def test_frozen_parameters_do_not_count_and_tied_ones_do_once() -> None:
    first, second, frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second, frozen.requires_grad_(False))
    alike = [p for p in model.parameters() if p.requires_grad]
    for parameters in (model, [*alike, *alike]):
        watch = ParameterWatch(parameters, every=1)
        with watch, torch.no_grad():
            first.weight.mul_(1.5)
        taken = watch.take()
        assert float(taken["param_norm"]) == pytest.approx(
            math.hypot(*(float(p.detach().double().norm()) for p in alike)), rel=CLOSE
        )
        [ratio, *others] = plain(taken)["update_ratios"]
        assert ratio == pytest.approx(0.5, rel=CLOSE)
        assert others == [0, 0]
    assert taken["layers"].names == ("0", "1", "2")


def test_parameters_that_were_zero() -> None:
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    watch = ParameterWatch([zero, still], every=1)
    with watch, torch.no_grad():
        zero.add_(2)
    taken = watch.take()
    assert plain(taken)["update_ratios"] == [math.inf, 0]
    assert float(taken["update_ratio"]) == math.inf
    with watch:
        pass
    assert float(watch.take()["update_ratio"]) == 0


def test_what_is_not_finite_shows() -> None:
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    watch = ParameterWatch([good, bad], every=1)
    with watch, torch.no_grad():
        bad[1] = math.nan
    taken = watch.take()
    assert math.isnan(taken["param_norm"])
    assert math.isnan(taken["update_ratio"])
    assert plain(taken)["update_ratios"][0] == 0
    assert math.isnan(plain(taken)["update_ratios"][1])


ODD: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 4).t(),
    "strided": lambda: torch.randn(6, 4)[::2, 1:],
    "complex": lambda: torch.randn(4, 2, dtype=torch.complex64),
    "0-d": lambda: torch.tensor(3.0),
    "huge": lambda: torch.full((4,), 3e38),
    "tiny": lambda: torch.full((4,), 1e-30),
}


@pytest.mark.parametrize("kind", ODD)
def test_parameters_of_every_shape(kind: str) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(ODD[kind]())
    named = [("w", parameter), ("other", nn.Parameter(torch.tensor([2.0], dtype=torch.bfloat16)))]
    watch = ParameterWatch(named, every=1)
    before = copies(list(named))
    with watch, torch.no_grad():
        parameter.mul_(0.999)
    by_hand = expected(before, copies(list(named)))
    if kind == "huge":  # the norm of four is beyond float32
        by_hand |= {"param_norm": math.inf}
        by_hand["param_norms"][0] = math.inf
    assert close(watch.take(), by_hand)


def test_empty_and_no_parameters() -> None:
    watch = ParameterWatch(nn.ReLU(), every=1)
    with watch:
        pass
    assert watch.take() == {}
    watch = ParameterWatch([nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(1))], every=1)
    with watch:
        pass
    assert plain(watch.take()) == {
        **{"param_norm": 1, "update_ratio": 0, "names": ("0", "1")},
        **{"param_norms": [0, 1], "update_ratios": [0, 0]},
    }


def test_a_module_is_read_again_in_every_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    watch = ParameterWatch(model, every=1)
    model.append(nn.Linear(2, 1))
    model[0].requires_grad_(False)
    with watch:
        pass
    assert watch.take()["layers"].names == ("1.weight", "1.bias")


def test_tensors_that_are_replaced_in_the_block() -> None:
    parameter = nn.Parameter(torch.ones(4))
    watch = ParameterWatch([parameter], every=1)
    with watch:
        parameter.data = torch.full((4,), 3.0)
    assert plain(watch.take())["update_ratio"] == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_read_on_the_host(mode: str, dtype: torch.dtype) -> None:
    model = with_gradients(net(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = ParameterWatch(model, every=1)
    with MODES[mode]():
        with watch:
            optimizer.step()
        taken = watch.take()
    assert float(taken["update_ratio"]) > 0


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_of_one_process(mesh: Any) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.arange(1.0, 7.0), mesh, [Shard(0)]))
    watch = ParameterWatch([("w", parameter)], every=1)
    with watch, torch.no_grad():
        assert isinstance(parameter, DTensor)
        parameter.mul_(2)
    assert plain(watch.take())["update_ratio"] == pytest.approx(1.0, rel=CLOSE)


def test_wrong_arguments() -> None:
    for every in (0, -1, 1.5, True):
        kind: type[Exception] = ValueError if isinstance(every, int) and every < 1 else TypeError
        with pytest.raises(kind, match=f"every must be .* at least 1, got {every}"):
            ParameterWatch(net(), every=every)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameters must be a Tensor, a Module, or an iterable"):
        ParameterWatch(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_parameters_that_a_block_exchanges(tied: bool) -> None:
    """As ``load_state_dict(assign=True)`` does: what the module has at the end is measured."""
    model = nn.ModuleDict({"one": nn.Linear(6, 8), "other": nn.Linear(6, 8)})
    if tied:
        model["other"].weight = model["one"].weight
    watch = ParameterWatch(model, every=1)
    before = copies(list(model.named_parameters()))
    state = {name: 1.5 * each + 0.1 for name, each in model.state_dict().items()}
    with watch:
        model.load_state_dict(state, assign=True)
    found, after = plain(watch.take()), copies(list(model.named_parameters()))
    wanted = expected(before, {name: after[name] for name in before})
    assert found.pop("names") == wanted.pop("names")
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-5), name


@pytest.mark.parametrize("bias", [None, nn.Parameter(torch.zeros(4))], ids=["gone", "shape"])
def test_parameters_that_a_block_loses(bias: nn.Parameter | None) -> None:
    layer = nn.Linear(6, 8)
    watch = ParameterWatch(layer, every=1)

    def block() -> None:
        with watch:
            layer.register_parameter("bias", bias)

    with pytest.raises(RuntimeError, match=r"the parameter 'bias' was removed or replaced by"):
        block()
    assert watch.take() == {}
    with watch:
        pass
    found = watch.take()["param_norm"].item()
    assert found == pytest.approx(layer.weight.norm().item(), rel=CLOSE)
