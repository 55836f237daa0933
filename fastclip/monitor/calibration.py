"""A clipping threshold from the gradient norms of a healthy run."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastclip.checks import require
from fastclip.monitor.robust import median

FEWEST_CLIPPED = 10  # norms that have to be above the threshold for it to mean something
MAX_DRIFT = 2.0  # beyond this factor between early and late norms no fixed threshold fits both
HALFLIVES = 10, 100  # of LogZ: norms that tell a spread, at least; the default
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Calibration(NamedTuple):
    """A threshold and how much can be made of it.

    Attributes:
        max_norm: the threshold, in the unit of the norms.
        clip_rate: the share of the norms above it.
        samples: how many norms there were.
        drift: the median norm of the second half over that of the first.
        warnings: sentences. The half-life that one of them may name takes the norms to be those
            of every step.
    """

    max_norm: float
    clip_rate: float
    samples: int
    drift: float
    warnings: tuple[str, ...]


def suggest_max_norm(norms: Iterable[float | None], clip_rate: float = 0.01) -> Calibration:
    """The smallest threshold that clips no more than `clip_rate` of a healthy run's steps.

    >>> suggest_max_norm(record.grad_norm for record in JSONL("run.jsonl")).max_norm

    It is one of the norms: of n in ascending order, from 1, number ``n - floor(clip_rate * n)``.

    Args:
        norms: gradient norms before clipping, in the order of the steps; missing and non-finite
            ones are left out. Those of a warm-up count like all others: better leave them out too.
        clip_rate: the share of steps to clip, over 0 and under 1.

    Returns:
        The threshold. Its `warnings` say so if the median norm of the second half is more than
        twice or less than half that of the first, when no fixed threshold fits both.

    Raises:
        TypeError: `clip_rate` is no number.
        ValueError: `clip_rate` is out of its range, or there are fewer than ``10 / clip_rate``
            norms, a share of which cannot be told from chance.
    """
    require("clip_rate", clip_rate, "a share over 0 and under 1", lambda x: 0 < x < 1)
    kept = _usable(norms)
    needed = _needed(clip_rate)
    if len(kept) < needed:
        raise ValueError(
            f"a clip rate of {clip_rate:g} needs at least {needed} gradient norms, got {len(kept)}"
        )
    ordered = sorted(kept)
    max_norm = _threshold(ordered, clip_rate)
    drift = _drift(kept)
    reached = _share_above(ordered, max_norm)
    return Calibration(max_norm, reached, len(kept), drift, _warnings(max_norm, drift, len(kept)))


def _needed(clip_rate: float) -> int:
    return math.ceil(min(FEWEST_CLIPPED / clip_rate, 1e18))  # no run is longer than that


def lowest_clip_rate(norms: Iterable[float | None]) -> float | None:
    """The lowest clip rate of one significant digit that so many norms can tell, if any is."""
    count = len(_usable(norms))
    if count <= FEWEST_CLIPPED:
        return None
    exponent = math.floor(math.log10(FEWEST_CLIPPED / count))
    rates = (float(f"{digit}e{exponent}") for digit in range(1, 10))
    return next((rate for rate in rates if _needed(rate) <= count), None)


def _threshold(ordered: Sequence[float], clip_rate: float) -> float:
    """The smallest of ascending `ordered` with no more than the share `clip_rate` above it."""
    above = int(clip_rate * len(ordered)) + 1
    while above / len(ordered) > clip_rate:  # the product may be off by a rounding
        above -= 1
    return ordered[len(ordered) - 1 - above]


def clip_rates(norms: Iterable[float | None]) -> list[tuple[float, float]]:
    """The curve of clip rate against threshold: pairs of a threshold and the share of `norms` above
    it, for those of `RATES` that so many norms can tell.
    """
    ordered = sorted(_usable(norms))
    rates = [rate for rate in RATES if len(ordered) >= FEWEST_CLIPPED / rate]
    thresholds = [_threshold(ordered, rate) for rate in rates]
    return [(max_norm, _share_above(ordered, max_norm)) for max_norm in thresholds]


def _usable(norms: Iterable[float | None]) -> list[float]:
    return [float(norm) for norm in norms if norm is not None and math.isfinite(norm)]


def _share_above(ordered: Sequence[float], max_norm: float) -> float:
    return (len(ordered) - bisect_right(ordered, max_norm)) / len(ordered)


def _drift(norms: Sequence[float]) -> float:
    half = len(norms) // 2
    early, late = median(sorted(norms[:half])), median(sorted(norms[half:]))
    if early == late:
        return 1.0
    return late / early if early else math.inf


def _adaptive(drift: float, samples: int) -> str:
    """LogZ with a half-life for which norms that change by the factor `drift` within half of the
    samples, one a step, look like no more than a factor of 2.

    Where log N has the slope b a step, the mean of LogZ lags behind by ``b * h / ln 2`` and its
    standard deviation is at least that much. With k = 4 a fall therefore raises the threshold by
    the factor ``exp(5 * b * h / ln 2)``: by 2 for ``h = ln(2)**2 / (5 * b)``.
    """
    change = abs(math.log(drift)) if 0 < drift < math.inf else math.inf
    shortest, default = HALFLIVES
    halflife = max(shortest, math.log(2) ** 2 / 5 * (samples / 2) / change)
    return f"fastclip.rules.LogZ({f'halflife={halflife:.0f}' if halflife < default else ''})"


def _warnings(max_norm: float, drift: float, samples: int) -> tuple[str, ...]:
    found = []
    if not 1 / MAX_DRIFT <= drift <= MAX_DRIFT:
        found.append(
            f"the median norm of the second half is {drift:.3g} times that of the first: no fixed "
            f"threshold fits both; an adaptive rule such as {_adaptive(drift, samples)} follows "
            "the norm"
        )
    if max_norm == 0:
        found.append("a threshold of 0 makes every gradient 0: most of these norms are 0")
    return tuple(found)
