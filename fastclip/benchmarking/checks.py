"""Whether a call did its work: one standard for every side, in parts that are not timed.

The norm has to be what the values give, and every gradient what that norm makes of it. The first
call of each side is compared element by element; later ones in a few tensors, others each time,
so that to look does not push a list out of the cache that a row calls warm.
"""

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from fastclip.benchmarking.contest import OURS
from fastclip.benchmarking.workloads import Clip

NORM = 0.03  # torch's bfloat16 norm is rounded twice, 0.4 % each
NORM_FLOAT16 = 0.25  # torch's is 20 % too small on one tensor of 131 M elements; not for fastclip
ROUNDING = 0.02  # norm, coefficient and product in bfloat16


class WrongResult(RuntimeError):
    """A call that did not do what the row says: it must not become a number."""


def require_right(
    name: str,
    problem: Clip,
    norm: torch.Tensor | None,
    *,
    max_norm: float | None = None,
    loss_scale: float = 1.0,
) -> None:
    """Clipped or left alone as the threshold wants, after a division by `loss_scale`; `norm` is
    None where a function returns none."""
    require_norm(name, problem, norm, loss_scale)
    require_gradients(
        name, problem, problem.gradients, norm, max_norm=max_norm, loss_scale=loss_scale
    )


def require_norm(
    name: str, problem: Clip, norm: torch.Tensor | None, loss_scale: float = 1.0
) -> None:
    right = problem.norm / loss_scale
    if norm is not None and not abs(float(norm) / right - 1) <= tolerance(name, problem):
        raise WrongResult(f"{name} returned a norm of {float(norm):g}, where {right:g} is right")


def require_gradients(
    name: str,
    problem: Clip,
    grads: Sequence[torch.Tensor],
    norm: torch.Tensor | None = None,
    *,
    max_norm: float | None = None,
    loss_scale: float = 1.0,
) -> None:
    """Every element is the original times the threshold over `norm` (the right one if None), or,
    if the threshold is larger, the original itself; both divided by `loss_scale`, a power of 2."""
    threshold = problem.max_norm if max_norm is None else max_norm
    factor, error = 1 / loss_scale, 0.0
    if threshold < problem.norm / loss_scale:
        factor *= threshold / (problem.norm / loss_scale if norm is None else float(norm))
        error = tolerance(name, problem) if norm is None else ROUNDING
    low, high = problem.left(grads, whole=problem.is_first(name))
    if not (low >= factor * (1 - error) and high <= factor * (1 + error)):
        raise WrongResult(
            f"{name} left {low:g} to {high:g} of the elements of the gradients, where "
            f"{factor:g} is right"
        )


def tolerance(name: str, problem: Clip) -> float:
    """Of a norm; that of n random elements is off by 0.27 / sqrt(n) itself (one sigma)."""
    half = name != OURS and any(grad.dtype == torch.float16 for grad in problem.gradients)
    return (NORM_FLOAT16 if half else NORM) + 1 / math.sqrt(problem.n_elements)


def require_statistics(
    name: str, right: dict[str, torch.Tensor], found: dict[str, torch.Tensor | None]
) -> None:
    """The same names and, within the rounding of float32 sums, the same values."""
    for key, expected in right.items():
        values = found.get(key)
        if values is None or values.shape != expected.shape:
            raise WrongResult(f"{name} returned no {key} of {len(expected)} tensors")
        if not torch.allclose(values.double(), expected.double(), rtol=1e-3, atol=0):
            raise WrongResult(f"{name} returned wrong {key}")


class Moves:
    """Whether an optimizer steps: `mark` before a call, `require` after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._before = self._state()

    def require(self, name: str) -> None:
        """Every parameter has moved (its first element), by one step."""
        for (old, n_old), (new, n_new) in zip(self._before, self._state(), strict=True):
            if new == old or n_new != n_old + 1:
                raise WrongResult(
                    f"{name} moved a parameter from {old:.9g} to {new:.9g} in {n_new - n_old:g} "
                    "steps, where one step is right"
                )

    def _state(self) -> list[tuple[float, float]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        steps = [self._optimizer.state.get(p, {}).get("step", 0.0) for p in parameters]
        return [
            (float(p.detach().view(-1)[0]), float(n))
            for p, n in zip(parameters, steps, strict=True)
        ]
