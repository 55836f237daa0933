"""A threshold for the global norm: a percentile of the last ones."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip.rules.contract import Decision, Measured, State, bounded, require, require_max_norm


@dataclass(frozen=True)
class AutoClip:
    """Clip the global norm to a percentile of the last `window` norms, this one included.

    The percentile is ``torch.quantile(norms, percentile / 100)``, linear, of the norms before
    clipping. There is no warm-up: the first step is its own percentile and passes. `max_norm` caps
    the threshold. The coefficient of a norm N over the percentile is ``threshold / (N + 1e-6)``.
    After AutoClip (arXiv 2007.14469), which keeps all norms.

    It is less a guard against spikes than a choice of step size. With the usual percentile of 10,
    nine steps in ten are clipped, to about the same norm: the update hardly depends on the norm of
    the gradient, which wants a learning rate of its own. Norms are remembered unclipped, so the
    threshold follows a lasting change of level within the `window` and a divergence too; and a
    percentile of 100 clips nothing. A bounded window forgets the large norms of early training,
    where the original never does; for a window under some hundred steps its author advises a
    percentile of about 80.

    State: norms (float64 ``[window]``, a ring, 0 where not filled yet) and count (int64, 0-d).

    Args:
        percentile: from 0 to 100.
        window: how many norms are remembered, at least 1.
        max_norm: the most that the threshold may be; None: no such cap.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its range.
    """

    percentile: float = 10.0
    window: int = 1000
    max_norm: float | None = None

    per_tensor = False

    def __post_init__(self) -> None:
        require("percentile", self.percentile, "a number from 0 to 100", lambda x: 0 <= x <= 100)
        require("window", self.window, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        require_max_norm(self.max_norm)

    def init(self, n: int, device: torch.device) -> State:
        return {
            "norms": torch.zeros(self.window, dtype=torch.float64, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }

    def decide(self, measured: Measured, state: State) -> Decision:
        total = measured.total
        usable = total.isfinite()
        places = torch.arange(self.window, device=total.device)
        here = usable & (places == state["count"] % self.window)
        norms = torch.where(here, total, state["norms"])
        count = state["count"] + usable
        limit = _quantile(torch.where(places < count, norms, math.inf), count, self.percentile)
        coef, threshold = bounded(total, ~(total <= limit), limit, self.max_norm)
        return Decision(coef, threshold, {"norms": norms, "count": count})


def _quantile(values: Tensor, count: Tensor, percentile: float) -> Tensor:
    """The linear quantile of the smallest `count` of `values`, infinity if that is 0.

    Not torch.quantile: how many there are is known to the device alone.
    """
    ordered = values.sort().values
    place = (count.clamp(1, len(values)) - 1).double() * (percentile / 100)
    below = place.floor()
    low, high = ordered.gather(0, torch.stack([below, place.ceil()]).long()).unbind()
    return torch.where(low < high, low + (high - low) * (place - below), low)
