"""Rules: by how much the gradients of a step are to be shortened.

| rule       | threshold                                                                |
|------------|--------------------------------------------------------------------------|
| `MaxNorm`  | one for the global norm                                                  |
| `AGC`      | one per unit (row): a share of the parameter's own norm                  |
| `AdaGC`    | one per tensor: a little over the running mean of its clipped norms      |
| `ZClip`    | for the global norm, by its z-score against running mean and variance    |
| `LogZ`     | for the global norm, by the z-score of its logarithm                     |
| `AutoClip` | for the global norm, a percentile of the last ones                       |

A rule is a pure function of what was measured and of a dict of state tensors. It runs on the
device, never waits for it, and keeps NaN and infinities out of its state (see `Rule`). One's own
is a class with two methods. This one, with torch and `Decision` imported, clips to twice the
running mean of what it let through::

    class TwiceTheMean:
        per_tensor = False

        def init(self, n, device):
            return {"mean": torch.zeros((), dtype=torch.float64, device=device)}

        def decide(self, measured, state):
            mean = torch.where(state["mean"] > 0, state["mean"], measured.total)
            coef = (2 * mean / (measured.total + 1e-6)).clamp(max=1)
            seen = 0.99 * mean + 0.01 * coef * measured.total
            kept = torch.where(measured.total.isfinite(), seen, state["mean"])
            return Decision(coef, 2 * mean, {"mean": kept})
"""

from fastclip.passes import scale_units_ as scale_units_
from fastclip.rules.adagc import AdaGC as AdaGC
from fastclip.rules.agc import AGC as AGC
from fastclip.rules.autoclip import AutoClip as AutoClip
from fastclip.rules.contract import Decision as Decision
from fastclip.rules.contract import Measured as Measured
from fastclip.rules.contract import Rule as Rule
from fastclip.rules.contract import State as State
from fastclip.rules.contract import UnsuitableGradient as UnsuitableGradient
from fastclip.rules.contract import require_decision as require_decision
from fastclip.rules.logz import LogZ as LogZ
from fastclip.rules.max_norm import MaxNorm as MaxNorm
from fastclip.rules.zclip import ZClip as ZClip

__all__ = [
    "AGC",
    "AdaGC",
    "AutoClip",
    "Decision",
    "LogZ",
    "MaxNorm",
    "Measured",
    "Rule",
    "State",
    "UnsuitableGradient",
    "ZClip",
    "scale_units_",
]
