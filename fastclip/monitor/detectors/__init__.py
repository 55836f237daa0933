"""Detectors: pure functions from a state and a record to the next state and events.

====================  ============================================================================
`Spike`               a value of at least `ratio` times the mean before it
`RobustSpike`         a value more than `k` robust standard deviations above the median before it
`Sustained`           several values in a row well above the median before them
`Drift`               a running median well above the best one so far
`NonFinite`           a NaN or an infinity in a metric, or in the gradients
`LossScaleDrop`       a loss scale that keeps falling
`ClipRate`            a large share of steps clipped
====================  ============================================================================

All but `NonFinite` pass over values that are None, NaN or infinite and do not remember them; every
finite value is remembered, whether it raised an alarm or not. Windows count recorded values, not
steps, and a detector is silent until its window is full. It fires on each record for which its
condition holds. Rules with a ratio need a positive baseline and are silent at or below zero.
"""

from fastclip.monitor.detectors.contract import Detector as Detector
from fastclip.monitor.detectors.contract import State as State
from fastclip.monitor.detectors.numerics import ClipRate as ClipRate
from fastclip.monitor.detectors.numerics import LossScaleDrop as LossScaleDrop
from fastclip.monitor.detectors.numerics import NonFinite as NonFinite
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
