"""Small training runs: parameters, streams of gradients, optimizers, rules, and comparisons."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import fastclip.rules
from fastclip.testing.compare import bitwise_equal
from tests import reference_rules

Parameters = dict[str, nn.Parameter]
Gradients = Mapping[str, Tensor | None]

SHAPES = {"embed.weight": (6, 3), "layer.weight": (4, 5), "layer.bias": (4,), "scale": ()}
NORM = math.sqrt(sum(math.prod(shape) for shape in SHAPES.values()))  # of a usual gradient, 6.6

# What of torch.optim can be fused, and what cannot: the class and its options.
FUSIBLE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.01}),
}
UNFUSED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {}),
}
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
FUSED = [f"{name}-fused" for name in FUSIBLE]
OPTIMIZERS = FUSED + [
    f"{name}-{mode}" for mode in ("foreach", "loop") for name in (*FUSIBLE, *UNFUSED)
]

# Rules with warm-ups short enough to be over after a few steps. They bind at a good share of steps.
RULES: dict[str, dict[str, Any]] = {
    "MaxNorm": {"max_norm": 5.0},
    "ZClip": {"alpha": 0.9, "z": 1.5, "warmup": 6, "max_norm": 9.0},
    "LogZ": {"k": 1.0, "halflife": 20, "warmup": 6, "max_norm": 20.0},
    "AutoClip": {"percentile": 60.0, "window": 25},
    "AdaGC": {"ratio": 1.1, "beta": 0.9, "warmup": 6, "max_norm": 5.0},
    "AGC": {"clip_factor": 0.8, "eps": 1e-3},
}
ONE_COEFFICIENT = ["MaxNorm", "ZClip", "LogZ", "AutoClip"]
PER_TENSOR = ["AdaGC", "AGC"]
POLICIES = ["skip", "zero", "error", "propagate"]
BAD = (math.nan, math.inf, -math.inf)


def rule(name: str) -> fastclip.rules.Rule:
    """The rule of that name, with the options of `RULES`."""
    made: fastclip.rules.Rule = getattr(fastclip.rules, name)(**RULES[name])
    return made


class TorchNorm:
    """What MaxNorm is compared with: torch's own function."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def clip_(self, parameters: Iterable[Tensor]) -> float:
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.max_norm))


def plain_rule(name: str) -> Any:
    """Its plain counterpart: `clip_(parameters)` multiplies the gradients."""
    if name == "MaxNorm":
        return TorchNorm(**RULES[name])
    return getattr(reference_rules, name)(**RULES[name])


def clipper(
    params: Parameters, name: str = "MaxNorm", *, nonfinite: Any = "skip"
) -> fastclip.GradClipper:
    """A clipper of all of them by the rule of that name."""
    return fastclip.GradClipper(params.items(), rule=rule(name), nonfinite=nonfinite)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 1) -> Parameters:
    """The same values for the same seed, whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def optimizer(name: str, params: Parameters, **options: Any) -> Optimizer:
    """One of `OPTIMIZERS`, with two groups of different learning rates."""
    algorithm, mode = name.rsplit("-", 1)
    made, own = (FUSIBLE | UNFUSED)[algorithm]
    values = list(params.values())
    groups: list[dict[str, Any]] = [{"params": values[:1], "lr": 0.02}, {"params": values[1:]}]
    return made(groups, **{"lr": 0.01, **own, **MODES[mode], **options})


def stream(
    steps: int,
    seed: int = 2,
    bad: Mapping[int, float] | None = None,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> list[dict[str, Tensor]]:
    """Normal gradients whose size varies from step to step, every 11th 15 times as large.

    `bad` puts values into the middle of ``layer.weight`` at some steps.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        size = math.exp(0.3 * torch.randn((), generator=generator).item())
        size *= 15 if step % 11 == 10 else 1
        grads = {name: size * torch.randn(s, generator=generator) for name, s in shapes.items()}
        if bad and step in bad:
            grads["layer.weight"][1, 2] = bad[step]
        made.append(grads)
    return made


def assign(params: Parameters, grads: Gradients, dtype: torch.dtype | None = None) -> None:
    """Copies of the gradients, in the parameters' dtype or the given one."""
    for name, parameter in params.items():
        grad = grads.get(name)
        parameter.grad = None if grad is None else grad.to(dtype or parameter.dtype, copy=True)


def make_scaler(init_scale: float = 2.0**13, growth_interval: int = 12) -> GradScaler:
    return GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)


def backward(params: Parameters, grads: Gradients, scaler: GradScaler, half: bool = False) -> None:
    """A loss with these gradients, scaled; `half` rounds them to float16, which may overflow."""
    for parameter in params.values():
        parameter.grad = None
    given = {name: grad for name, grad in grads.items() if grad is not None}
    loss = torch.stack([(params[name] * grad).sum() for name, grad in given.items()]).sum()
    scaler.scale(loss).backward()
    if half:
        for name in given:
            grad = params[name].grad
            params[name].grad = None if grad is None else grad.half().float()


def gradients(params: Parameters) -> dict[str, Tensor | None]:
    """Copies of what is there now."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in params.items()
    }


def values(params: Parameters) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in params.items()}


def snapshot(tree: Any) -> Any:
    """A copy of nested dicts and sequences of tensors."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return tree


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nested states are not bitwise the same, in words; empty if they are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        dense = (x.detach().clone(memory_format=torch.contiguous_format) for x in (a, b))
        return [] if bitwise_equal(*dense) else [f"{where}: {a.tolist()} is not {b.tolist()}"]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        alone = sorted(map(str, a.keys() ^ b.keys()))
        found = [f"{where}.{key}: on one side only" for key in alone]
        shared = [key for key in a if key in b]
        return found + [d for key in shared for d in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} is not {b!r}"]


def same(a: Any, b: Any, when: str = "") -> None:
    """Asserts that two nested states are bitwise the same."""
    __tracebackhide__ = True
    found = differences(a, b)
    assert not found, "\n".join([when, *found])


def near(a: Gradients, b: Gradients, relative: float, when: str = "") -> None:
    """Asserts that a is no further from b than `relative`.

    Parameters as one vector, and the moments of one name, ``"0.exp_avg"`` and ``"1.exp_avg"``, too:
    a single number of either may be anywhere near 0 by cancellation.
    """
    __tracebackhide__ = True
    assert a.keys() == b.keys(), f"{when}: {sorted(a.keys() ^ b.keys())} on one side only"
    kinds: dict[str, list[str]] = {}
    for name in b:
        kinds.setdefault(name.split(".")[1] if name[0].isdigit() else "all", []).append(name)
    for kind, names in kinds.items():
        pairs = [(a[name], b[name]) for name in names]
        assert all((x is None) == (y is None) for x, y in pairs), f"{when}: None on one side only"
        both = [(x.detach(), y.detach()) for x, y in pairs if x is not None and y is not None]
        error, size = total([x.double() - y.double() for x, y in both]), total([y for _, y in both])
        # false for NaN too
        assert error <= relative * size, f"{when}: {kind} {error:.3e} off a norm of {size:.3e}"


def moments(made: Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, by parameter number and name."""
    return {
        f"{number}.{name}": value
        for number, state in made.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def with_nonfinite(tree: Any, where: str = "") -> list[str]:
    """Where in a nested state there is a NaN or an infinity."""
    if isinstance(tree, Tensor):
        return [] if tree.isfinite().all() else [f"{where}: {tree.tolist()}"]
    if isinstance(tree, Mapping):
        return [d for key, value in tree.items() for d in with_nonfinite(value, f"{where}.{key}")]
    return []


def nonfinite(made: Optimizer) -> list[str]:
    return with_nonfinite(moments(made))


def counted(made: fastclip.GradClipper) -> tuple[int, ...]:
    """Steps, clipped, skipped, consecutive skips, as numbers."""
    counters = made.counters()
    names = ("steps", "clipped", "skipped", "consecutive_skips")
    assert tuple(counters) == names
    return tuple(int(counters[name]) for name in names)


def rule_state(made: fastclip.GradClipper) -> Any:
    """All that is saved of a clipper but its counters."""
    return snapshot({k: v for k, v in made.state_dict().items() if k != "counters"})


def total(grads: Gradients | Sequence[Tensor], p: float = 2.0) -> float:
    """The norm of all gradients as one vector, in float64."""
    tensors = grads.values() if isinstance(grads, Mapping) else grads
    parts = [grad.double().reshape(-1) for grad in tensors if grad is not None]
    return torch.linalg.vector_norm(torch.cat(parts), p).item()
