"""A threshold for the global norm from the z-score of its logarithm."""

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
class LogZ:
    """Clip the global norm N to ``exp(m + k * s)``.

    m and s are the exponential mean and standard deviation of log N over the steps before::

        m = sum(w * x) / sum(w),  s**2 = sum(w * (x - m)**2) / sum(w),  w = 2**(-age / halflife)

    (the division by the sum of weights is the bias correction). What is remembered of a step, x, is
    ``min(log N, m + k * s)`` with the m and s it was judged by; in the first `warmup` steps, which
    clip to `max_norm` alone, it is log N. The coefficient is ``min(1, t / (N + 1e-6))``: t is the
    threshold where N is over it, else infinity, and at most `max_norm`, which does not change x.

    Gradient norms spread by factors, not by amounts: in the logarithm k means the same for large
    and for small ones, multiplying the loss by a constant multiplies the thresholds by it, and the
    rule needs no tuning per model. What is given up for that:

    * A spike is remembered as no more than the threshold it was clipped to, so it cannot hide the
      next one: with a the weight of the newest step (1 / sum(w), at most 0.024 after 50 steps of
      halflife 100, in the long run 0.007) a spike raises m + k * s by at most
      ``a * k * (k**2 + 1) / 2 * s``, 0.24 s in the long run with k = 4. A rise that is meant to
      stay is therefore followed by that much a step and no faster.
    * With k = 4 only what is far out of the ordinary is clipped: it stops spikes and, unlike
      ZClip, does nothing to norms that are merely high. A spike is cut to the edge of the ordinary
      and not to the mean.
    * Only large norms are capped. An exceptionally small one widens s, and so raises the threshold,
      until it is forgotten; so does a spike in warm-up, where `max_norm` alone protects.
    * Norms that do not vary at all have s = 0: any larger one is then clipped to them.

    A norm of 0 has no logarithm: it is never clipped and leaves the state as it is.

    State, 0-d: mean (m), spread (the sum of ``w * (x - m)**2``) and weight (the sum of w), float64;
    count, int64. After the log-normal rule of arXiv 1804.09849, which discards such steps.

    Args:
        k: standard deviations of log N above its mean, at least 0.
        halflife: steps after which a norm has half its weight, over 0; infinity forgets nothing.
        warmup: steps that only `max_norm` clips, at least 2.
        max_norm: the most that the threshold may be; None: no such cap.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    k: float = 4.0
    halflife: float = 100
    warmup: int = 50
    max_norm: float | None = None

    per_tensor = False

    def __post_init__(self) -> None:
        require("k", self.k, "a finite number of at least 0", lambda x: x >= 0)
        require("halflife", self.halflife, "a number over 0", lambda x: x > 0, infinite=True)
        require("warmup", self.warmup, "a whole number of at least 2", lambda x: x >= 2, whole=True)
        require_max_norm(self.max_norm)

    def init(self, n: int, device: torch.device) -> State:
        return scalars(device, "mean", "spread", "weight", counts=["count"])

    def decide(self, measured: Measured, state: State) -> Decision:
        mean, spread, weight = state["mean"], state["spread"], state["weight"]
        warm = state["count"] < self.warmup
        log = measured.total.log()
        limit = mean + self.k * (spread / weight.clamp(min=1.0)).sqrt()
        # In logarithms, where equal norms are equal to their mean, and true for NaN.
        over = ~warm & ~(log <= limit)
        coef, threshold = bounded(measured.total, over, limit.exp(), self.max_norm)

        # West's weighted form of Welford's update: no difference of large sums.
        decay = 0.5 ** (1 / self.halflife)
        x = torch.where(over, limit, log)
        weight = decay * weight + 1
        after = mean + (x - mean) / weight
        new = {
            "mean": after,
            "spread": decay * spread + (x - mean) * (x - after),
            "weight": weight,
            "count": state["count"] + 1,
        }
        return Decision(coef, threshold, keep(log.isfinite(), new, state))
