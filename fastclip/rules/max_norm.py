"""One threshold for the global norm."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.rules.contract import Decision, Measured, State, require


@dataclass(frozen=True, eq=False)  # comparing tensors would wait for the device
class MaxNorm:
    """Clip the global norm N to a fixed threshold, or to one that is a function of the step.

    The coefficient is ``min(1, max_norm / (N + 1e-6))``, as of ``torch.nn.utils.clip_grad_norm_``.
    There is no state.

    Args:
        max_norm: a number of at least 0 (infinity only measures), a one-element Tensor, which
            stays on its device with its value unchecked, or a schedule ``step -> number``, called
            once a step with the number of steps before it, skipped ones included.

    Raises:
        TypeError: `max_norm` is none of these, or a function that cannot be called with a step.
        ValueError: a number is negative or NaN, or the Tensor has not one element; for a number of
            a schedule when the step comes, with nothing changed.
    """

    max_norm: float | Tensor | Callable[[int], float]

    per_tensor = False

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, Tensor):
            if self.max_norm.numel() != 1:
                shape = tuple(self.max_norm.shape)
                raise ValueError(f"max_norm must have one element, got shape {shape}")
        elif not callable(self.max_norm):
            what = "a number of at least 0, a one-element Tensor or a function of the step"
            require("max_norm", self.max_norm, what, lambda x: x >= 0, infinite=True)
        else:
            _require_schedule(self.max_norm)

    def init(self, n: int, device: torch.device) -> State:
        return {}

    def limit(self, step: int) -> float | Tensor:
        """The threshold of that step: a checked number, or the 0-d Tensor."""
        if isinstance(self.max_norm, Tensor):
            # a copy: it comes back as stats.threshold, and this one may be changed
            return self.max_norm.detach().to(torch.float64, copy=True).reshape(())
        if not callable(self.max_norm):
            return float(self.max_norm)
        value = self.max_norm(step)
        what = "a number of at least 0"
        require(f"max_norm at step {step}", value, what, lambda x: x >= 0, infinite=True)
        return float(value)

    def decide(self, measured: Measured, state: State) -> Decision:
        total, limit = measured.total, self.limit(measured.step)
        if isinstance(limit, Tensor):
            threshold = limit.to(total.device, torch.float64)
        else:
            threshold = torch.full_like(total, limit)
        return Decision(tables.coefficient(total, threshold), threshold, state)


def _require_schedule(function: Callable[[int], float]) -> None:
    """Raise `TypeError` if it cannot be called with a step, as far as its signature tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as some that are written in C have none
        return
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            "max_norm as a function is called with the number of steps before it, as in "
            f"max_norm=lambda step: 1.0; {function!r:.80} takes {signature}: {error}"
        ) from None
