"""A threshold for the global norm from its z-score."""

import math
from dataclasses import dataclass

import torch

from fastclip.rules.contract import (
    Decision,
    Measured,
    State,
    bounded,
    keep,
    require,
    require_max_norm,
    scalars,
)


@dataclass(frozen=True)
class ZClip:
    """Clip the global norm when its z-score against exponential mean and variance is over `z`.

    With mean mu, standard deviation sigma and a norm N::

        score = (N - mu) / (sigma + eps)
        score > z:  threshold = mu + z**2 * sigma / score,  x = threshold
        else:       threshold = infinity,                   x = N
        mu = alpha * mu + (1 - alpha) * x
        var = alpha * var + (1 - alpha) * (x - mu)**2       with the new mu

    The larger the spike, the nearer the threshold is to mu. The first `warmup` norms, as they were
    before clipping, only make mu and the (population) variance. `max_norm` caps the threshold, in
    warm-up too, and does not change what is remembered.

    Norms that do not vary in warm-up, or are 0, leave sigma 0 and with it every later threshold at
    mu: a larger norm is clipped to mu and remembered as mu, so that the norm is held there for
    good. A run that may begin so wants a longer `warmup`, or another rule.

    The steps of the authors' implementation (bluorion-com/ZClip, arXiv 2504.02507) with its default
    options. As there, the coefficient is ``threshold / (N + 1e-6)`` where N is over the threshold,
    and in warm-up torch's ``min(1, max_norm / (N + 1e-6))``.

    State, 0-d: mean and var (float64), count (int64).

    Args:
        alpha: the share of mu and var that a step keeps, at least 0 and under 1.
        z: the score beyond which a norm is a spike, over 0, in standard deviations.
        warmup: steps that only `max_norm` clips, at least 1.
        max_norm: the most that the threshold may be; None: no such cap.
        eps: added to sigma in the score, over 0, in the unit of the norm.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    alpha: float = 0.97
    z: float = 2.5
    warmup: int = 25
    max_norm: float | None = 1.0
    eps: float = 1e-6

    per_tensor = False

    def __post_init__(self) -> None:
        require("alpha", self.alpha, "a number of at least 0 and under 1", lambda x: 0 <= x < 1)
        require("z", self.z, "a finite number over 0", lambda x: x > 0)
        require("warmup", self.warmup, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        require("eps", self.eps, "a finite number over 0", lambda x: x > 0)
        require_max_norm(self.max_norm)

    def init(self, n: int, device: torch.device) -> State:
        return scalars(device, "mean", "var", counts=["count"])

    def decide(self, measured: Measured, state: State) -> Decision:
        total = measured.total
        mean, var, count = state["mean"], state["var"], state["count"]
        warm = count < self.warmup
        std = var.sqrt()
        score = (total - mean) / (std + self.eps)
        score = score.nan_to_num(nan=math.inf, posinf=math.inf)  # a NaN is a spike
        spike = ~warm & (score > self.z)
        limit = mean + std * (self.z / score) * self.z  # z**2 may be beyond float64
        coef, threshold = bounded(total, spike, limit, self.max_norm)
        coef = torch.where(~warm & (total <= threshold), 1.0, coef)

        # In warm-up Welford's update, exact to rounding, so that no norms have to be kept.
        off = total - mean
        mean_of_all = mean + off / (count + 1)
        var_of_all = var + (off * (total - mean_of_all) - var) / (count + 1)
        x = torch.where(spike, limit, total)
        mean_after = self.alpha * mean + (1 - self.alpha) * x
        var_after = self.alpha * var + (1 - self.alpha) * (x - mean_after) ** 2
        new = {
            "mean": torch.where(warm, mean_of_all, mean_after),
            "var": torch.where(warm, var_of_all, var_after),
            "count": count + 1,
        }
        usable = total.isfinite() & new["var"].isfinite()  # the square of 1e200 is not
        return Decision(coef, threshold, keep(usable, new, state))
