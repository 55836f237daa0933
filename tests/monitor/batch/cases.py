"""Models with a fault at a known module, and healthy ones."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.monitor.batch.parts import (
    Apply,
    Between,
    Catching,
    Checkpointed,
    CheckpointedCode,
    Doubled,
    Rewriting,
    Siblings,
    Structured,
    Tied,
)

Forward = Callable[[], Tensor]
Origin = tuple[str, str] | None


class Case(NamedTuple):
    id: str
    build: Callable[[], tuple[nn.Module, Forward]]
    origin: Origin
    vanishes: bool = False  # what is not finite does not reach a parameter


def sqrt_at_zero() -> nn.Module:
    return Apply(lambda x: (x * 0).sqrt())


def batch(*shape: int) -> Tensor:
    """The same numbers on every device."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(5), device="cpu")
    return drawn.to(torch.get_default_device())


def summed(*parts: nn.Module, x: Tensor | None = None) -> tuple[nn.Module, Forward]:
    """The parts one after the other, on a batch; the loss is the sum."""
    model = nn.Sequential(*parts)
    given = batch(6, 4) if x is None else x
    return model, lambda: model(given).sum()


def healthy() -> tuple[nn.Sequential, Forward]:
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        nn.Linear(8, 3),
    )
    x, target = batch(16, 4), torch.arange(16) % 3
    return model, lambda: nn.functional.cross_entropy(model(x), target)


def transformer(poisoned: bool) -> tuple[nn.Module, Forward]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if poisoned:
        nn.init.constant_(model.get_parameter("layers.1.linear1.bias"), math.nan)
    x = batch(2, 5, 8)
    return model, lambda: model(x).square().mean()


def spoilt(module: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        module.weight[1, 2] = value
    return module


def weight_gradient() -> tuple[nn.Module, Forward]:
    """1e20 * 1e20 in the gradient of the weight alone."""
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model.get_parameter("0.weight"), 1e-30)
    x = torch.full((2, 4), 1e20)
    return model, lambda: (model(x) * 1e20).sum()


def running_mean() -> tuple[nn.Module, Forward]:
    model, forward = healthy()
    model.eval()
    model.get_buffer("1.running_mean")[3] = -math.inf
    return model, forward


def tied(shift: float) -> tuple[nn.Module, Forward]:
    model = Tied()
    return model, lambda: model(torch.arange(7), shift).logsumexp(0).sum()


def structured(bad: float) -> tuple[nn.Module, Forward]:
    model, x, more = Structured(), batch(6).requires_grad_(), batch(6)
    more[2] = bad
    return model, lambda: model(x, more).sum()


def rewriting() -> tuple[nn.Module, Forward]:
    model = Rewriting()
    return model, lambda: model(torch.arange(5)).square().mean()


def added() -> tuple[nn.Module, Forward]:
    """The gradient of what the second layer returns is 2e38 + 2e38."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Apply(lambda x: x * 2e38 + x * 2e38))
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    x = batch(2, 4)
    return model, lambda: model(x).sum()


def added_at_parameter() -> tuple[nn.Module, Forward]:
    scale = nn.Parameter(torch.zeros(()))
    model = Apply(lambda x: x * scale + x * scale)
    model.scale = scale
    return model, lambda: model(torch.full((), 2e38))


def penalty() -> tuple[nn.Module, Forward]:
    """forward() takes a gradient itself."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch(3, 4).requires_grad_()

    def forward() -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    return model, forward


def asking() -> tuple[nn.Module, Forward]:
    """forward() takes a gradient that is not finite, and leaves it at that."""
    model, x = nn.Sequential(nn.Linear(4, 4), sqrt_at_zero()), batch(3, 4).requires_grad_()

    def forward() -> Tensor:
        torch.autograd.grad(model(x).sum(), x)
        return model[0](x).sum()

    return model, forward


def sampled(part: nn.Module) -> tuple[nn.Module, Forward]:
    """The batch goes through one sample at a time."""
    model, x = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4)), batch(3, 4)
    return model, lambda: torch.func.vmap(model)(x).sum()


def sensitivity() -> tuple[nn.Module, Forward]:
    """The gradient of each sample, taken by torch.func."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch(3, 4)
    slopes = torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))
    return model, lambda: slopes(x).square().sum()


def sparse() -> tuple[nn.Module, Forward]:
    model = nn.Embedding(9, 4, sparse=True)
    return model, lambda: model(torch.tensor([1, 1, 4])).sum()


def written_to() -> tuple[nn.Module, Forward]:
    """A view of what a module returns is written to by the next, and all of it by another."""
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x[:, :2].mul_(2.0)))
    model.extend([nn.ReLU(inplace=True), sqrt_at_zero()])
    x = batch(6, 4)
    return model, lambda: model(x).sum()


def outside() -> tuple[nn.Module, Forward]:
    model, x = nn.Sequential(nn.Linear(4, 4)), batch(6, 4)
    return model, lambda: model(x).sum() + torch.tensor(1e3).exp()


def middle(part: nn.Module) -> tuple[nn.Module, Forward]:
    """Between two layers."""
    return summed(nn.Linear(4, 4), part, nn.Linear(4, 4))


def checkpointed(
    kind: type[Checkpointed], part: Callable[[], nn.Module], reentrant: bool
) -> tuple[nn.Module, Forward]:
    return middle(kind(part(), reentrant))


def frozen() -> tuple[nn.Module, Forward]:
    model, forward = healthy()
    return model.requires_grad_(False), forward


CASES = [
    Case("healthy", healthy, None),
    Case("transformer", lambda: transformer(False), None),
    Case("gru", lambda: summed(nn.GRU(4, 4), Apply(lambda both: both[0])), None),
    Case("rewriting", rewriting, None),
    Case("sparse gradient", sparse, None),
    Case("gradient of a gradient", penalty, None),
    Case("gradient not used", asking, None),
    Case("frozen", frozen, None),
    Case("torch.func.grad", sensitivity, None),
    Case("vmap", lambda: sampled(nn.Tanh()), None),
    Case("vmap, forward", lambda: sampled(Apply(lambda x: x.abs().neg().log())), ("1", "forward")),
    Case("vmap, backward", lambda: sampled(sqrt_at_zero()), ("1", "backward")),
    Case("nan in a batch", lambda: summed(nn.Tanh(), x=torch.tensor([math.nan])), ("0", "input")),
    Case(
        "nan in a weight",
        lambda: summed(nn.Linear(4, 4), nn.Sequential(spoilt(nn.Linear(4, 4), math.nan))),
        ("1.0", "forward"),
    ),
    Case("inf in a buffer", running_mean, ("1", "forward")),
    Case("nan in a bias", lambda: transformer(True), ("layers.1.linear1", "forward")),
    Case(
        "log of a negative",
        lambda: summed(nn.Linear(4, 4), Apply(lambda x: -x.square()), Apply(torch.log)),
        ("2", "forward"),
    ),
    Case("loss outside", outside, ("", "forward")),
    Case("sqrt at zero", lambda: middle(sqrt_at_zero()), ("1", "backward")),
    Case("siblings", lambda: summed(Siblings()), ("0.k", "backward")),
    Case("between parts", lambda: middle(Between()), ("1", "backward")),
    Case("a part raises", lambda: middle(Catching(False)), ("1", "backward")),
    Case("a hook raises", lambda: middle(Catching(True)), ("1", "backward")),
    Case("weight gradient", weight_gradient, ("0", "backward")),
    Case(
        "custom function",
        lambda: middle(Apply(lambda x: Doubled.apply(x, 2.0, x.detach())[0])),
        ("1", "backward"),
    ),
    Case("written to in place", written_to, ("3", "backward")),
    Case("tied", lambda: tied(1.0), None),
    Case("second call", lambda: tied(-1e3), ("log", "forward")),
    Case("structured", lambda: structured(1.0), None),
    Case("nested input", lambda: structured(math.nan), ("inner", "input")),
    Case("sum of gradients", added, ("1", "backward")),
    Case("sum at a parameter", added_at_parameter, ("", "backward")),
    Case(
        "masked within",
        lambda: middle(Apply(lambda x: (x - 9).relu().sqrt())),
        None,
    ),
    Case(
        "masked by another",
        lambda: summed(Apply(lambda x: x - 9), nn.ReLU(), sqrt_at_zero(), nn.Linear(4, 1)),
        None,  # nothing before the last layer has a gradient
    ),
    Case(
        "masked by another, trained",
        lambda: summed(nn.Linear(4, 4), Apply(lambda x: x - 9), nn.ReLU(), Apply(torch.sqrt)),
        ("3", "backward"),
        vanishes=True,
    ),
    *(
        Case(
            f"{'reentrant' if reentrant else 'saved'} checkpoint, {name}",
            partial(checkpointed, kind, part, reentrant),
            origin,
        )
        for reentrant in (True, False)
        for name, kind, part, origin in (
            ("healthy", Checkpointed, partial(nn.Linear, 4, 4), None),
            ("forward", Checkpointed, partial(Apply, torch.log), ("1.part", "forward")),
            ("backward", Checkpointed, Between, ("1.part", "backward")),
            ("own code", CheckpointedCode, partial(nn.Linear, 4, 4), ("1", "backward")),
        )
    ),
]
