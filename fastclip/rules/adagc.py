"""A threshold per tensor, which follows its clipped norms."""

import math
import sys
from dataclasses import dataclass

import torch

from fastclip.rules.contract import Decision, Measured, State, keep, require, require_max_norm

TINY = sys.float_info.min  # the smallest divisor, for a norm of 0 with an eps of 0


@dataclass(frozen=True)
class AdaGC:
    """Clip each tensor to `ratio` times gamma, the exponential mean of its own clipped norms.

    A tensor's first `warmup` steps are clipped by the global norm, ``c = min(1, max_norm / (total +
    eps))`` (not at all if `max_norm` is None), and gamma is the smallest of its norms after that.
    From then on, for a norm n::

        n > ratio * gamma:  coef = ratio * gamma / (n + eps),  x = ratio * gamma
        else:               coef = 1,                          x = n
        gamma = beta * gamma + (1 - beta) * x

    The steps of the authors' implementation (lishuai-97/AdaGC, arXiv 2502.11034), but for two
    things. The warm-up is counted per tensor: one that gets its first gradient late has its own,
    while the others are clipped adaptively already. And a step in which a tensor's norm is exactly
    0 does not count for its warm-up (LoRA's A in the first step, an expert without tokens):
    its coefficient is 1, and count and gamma stay. There, gamma is 0 from then on, and the tensor
    gets no gradient any more. For norms over 0 the results are theirs.

    The price of a steady threshold: gamma grows by at most a factor ``beta + (1 - beta) * ratio``
    a step, 1.0004 by default, so that a norm which doubles for good is held back for 1,733 steps.

    `threshold` is ``ratio * gamma``, and in warm-up `max_norm`, of the global norm, or infinity.
    State: gamma (float64) and count (int64), ``[n]``.

    Args:
        ratio: of the threshold to gamma, over 0.
        beta: the share of gamma that a step keeps, at least 0 and under 1.
        warmup: steps of a tensor that are clipped by the global norm.
        max_norm: the threshold of the global norm in warm-up; None: none.
        eps: added to the norm that is divided by, at least 0, in its unit.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    ratio: float = 1.04
    beta: float = 0.99
    warmup: int = 100
    max_norm: float | None = 1.0
    eps: float = 1e-6

    per_tensor = True

    def __post_init__(self) -> None:
        require("ratio", self.ratio, "a finite number over 0", lambda x: x > 0)
        require("beta", self.beta, "a number of at least 0 and under 1", lambda x: 0 <= x < 1)
        require("warmup", self.warmup, "a whole number of at least 0", lambda x: x >= 0, whole=True)
        require("eps", self.eps, "a finite number of at least 0", lambda x: x >= 0)
        require_max_norm(self.max_norm)

    def init(self, n: int, device: torch.device) -> State:
        return {
            "gamma": torch.zeros(n, dtype=torch.float64, device=device),
            "count": torch.zeros(n, dtype=torch.int64, device=device),
        }

    def decide(self, measured: Measured, state: State) -> Decision:
        total, norms = measured.total, measured.norms
        gamma, count = state["gamma"], state["count"]
        warm, first = count < self.warmup, count == 0
        idle = (warm | first) & (norms == 0)  # gamma would be 0 for good
        usable = norms.isfinite() & ~idle
        share = torch.ones_like(total)
        cap = math.inf if self.max_norm is None else self.max_norm
        if cap < math.inf:
            share = (cap / (total + self.eps).clamp(min=TINY)).clamp(max=1.0)
            usable &= ~warm | total.isfinite()  # without it a norm of another tensor gets in

        limit = self.ratio * torch.where(first, norms, gamma)
        within = norms <= limit  # false for NaN, which so reaches coef
        coef = torch.where(within, 1.0, limit / (norms + self.eps))
        clipped = torch.where(within, norms, limit)
        mean = torch.where(first, norms, gamma) * self.beta + clipped * (1 - self.beta)

        shared = share * norms
        smallest = torch.where(first, shared, torch.minimum(gamma, shared))
        new = {"gamma": torch.where(warm, smallest, mean), "count": count + 1}
        return Decision(
            torch.where(warm, share, coef).masked_fill(idle, 1.0),
            torch.where(warm, cap, limit),
            keep(usable, new, state),
        )
