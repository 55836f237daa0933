"""A small model in training, for tests of the order of calls in a loop."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

import fastclip

Clip = Callable[..., object]

# No lambdas: the guard names the line of the innermost call that is neither torch's nor fastclip's.
CLIPS: dict[str, Clip] = {
    "torch-norm": clip_grad_norm_,
    "torch-with-norm": functools.partial(clip_grads_with_norm_, total_norm=torch.tensor(10.0)),
    "torch-value": clip_grad_value_,
    "fastclip-norm": fastclip.clip_grad_norm_,
    "fastclip-norm-checked": functools.partial(fastclip.clip_grad_norm_, error_if_nonfinite=True),
    "fastclip-with-norm": functools.partial(fastclip.clip_grads_with_norm_, total_norm=10.0),
    "fastclip-value": fastclip.clip_grad_value_,
}


class Training:
    """A model, its optimizer, and a scaler that does nothing unless `scaled`."""

    def __init__(
        self,
        clip: Clip = clip_grad_norm_,
        scaled: bool = False,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **options: Any,
    ) -> None:
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1, bias=False)]
        self.model = nn.Sequential(*layers)
        self.params = list(self.model.parameters())
        self.optimizer = make(self.params, lr=0.01, **options)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        self.clip = clip
        self.set_to_none = True

    def loss(self, factor: float = 1.0) -> Tensor:
        return self.scaler.scale(self.model(torch.randn(8, 4)).square().mean() * factor)

    def backward(self, factor: float = 1.0) -> None:
        self.loss(factor).backward()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]


def line_of(function: Callable[..., object], marker: str = "# wrong") -> int:
    """The number of the only line of `function` that ends with `marker`."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [number for number, line in enumerate(lines) if line.rstrip().endswith(marker)]
    return first + offset


def warned(function: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings that `function` gives, each as often as it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return caught
