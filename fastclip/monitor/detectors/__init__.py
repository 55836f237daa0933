"""Detectors: pure functions from a state and a record to the next state and events.

| detector        | finds                                                                         |
|-----------------|-------------------------------------------------------------------------------|
| `Spike`         | a value of at least `ratio` times the mean before it                          |
| `RobustSpike`   | a value more than `k` robust standard deviations above the median before it   |
| `Sustained`     | several values in a row well above the median before them                     |
| `Drift`         | a running median well above the best one so far                               |
| `NonFinite`     | a NaN or an infinity in a metric, or in the gradients                         |
| `LossScaleDrop` | a loss scale that keeps falling                                               |
| `ClipRate`      | a large share of steps clipped                                                |
| `Skips`         | many updates in a row that were skipped; not among the defaults               |

All but `NonFinite` pass over values that are None, NaN or infinite and do not remember them; every
finite value is remembered, whether it raised an alarm or not. Windows count recorded values, not
steps, and a detector is silent until its window is full. It fires on each record for which its
condition holds. Rules with a ratio need a positive baseline and are silent at or below zero.

The defaults are for losses that stay well above zero and vary by a few percent, as those of
language models. Healthy ones get few warnings there: `ClipRate` while a warm-up is clipped, and
`RobustSpike` of 2 to 5 norms in 10,000 (45 with batches of two sequences), measured with small
transformers. Where the loss goes to zero or varies by half from one step to the next (small
batches, small data), what a ratio of 1.1 or 1.5 takes for a change is noise. This set is for those,
and for data that is fitted to the last example::

    [
        RobustSpike("loss", log=True),
        RobustSpike("grad_norm", k=10, log=True),
        Sustained(window=20, sustained=1.5, critical=3),
        Drift(window=200, ratio=1.5),
        NonFinite(),
        LossScaleDrop(),
        ClipRate(),
    ]

A loss around zero, as in reinforcement learning, has no ratios: `RobustSpike("loss")` judges it.
"""

from fastclip.monitor.detectors.contract import Detector as Detector
from fastclip.monitor.detectors.contract import State as State
from fastclip.monitor.detectors.numerics import ClipRate as ClipRate
from fastclip.monitor.detectors.numerics import LossScaleDrop as LossScaleDrop
from fastclip.monitor.detectors.numerics import NonFinite as NonFinite
from fastclip.monitor.detectors.numerics import Skips as Skips
from fastclip.monitor.detectors.spikes import RobustSpike as RobustSpike
from fastclip.monitor.detectors.spikes import Spike as Spike
from fastclip.monitor.detectors.trends import Drift as Drift
from fastclip.monitor.detectors.trends import Sustained as Sustained

__all__ = [
    "ClipRate",
    "Detector",
    "Drift",
    "LossScaleDrop",
    "NonFinite",
    "RobustSpike",
    "Skips",
    "Spike",
    "State",
    "Sustained",
    "default_detectors",
]


def default_detectors() -> list[Detector]:
    """What `Monitor(detectors=None)` watches with."""
    return [
        *(Spike(), RobustSpike("loss"), RobustSpike("grad_norm", log=True), Sustained(), Drift()),
        *(NonFinite(), LossScaleDrop(), ClipRate()),
    ]
