"""Fair timing of a few competitors: interleaved in alternating order, compared pair by pair.

A machine's speed drifts (clock, neighbours, caches), so two means taken one after the other
compare two moments as much as two programs. Here every round times every side once, odd rounds
backwards, and only times of the same round are divided by each other.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Side:
    """One competitor: `run` is timed; untimed, `before` prepares and `check` judges it."""

    name: str
    run: Callable[[], Any]
    before: Callable[[], None] | None = None
    check: Callable[[Any], None] | None = None


class Spread(NamedTuple):
    """A median with the 20th and the 80th percentile."""

    low: float
    median: float
    high: float


def interleave(
    sides: Sequence[Side], rounds: int, after: Callable[[int], None] | None = None
) -> dict[str, list[float]]:
    """Seconds per side, one per round; entry i of every list comes from round i. `after` is called,
    untimed, behind each round with its index."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    with no_garbage_collection():
        for index in range(rounds):
            for side in sides if index % 2 == 0 else reversed(sides):
                seconds[side.name].append(once(side))
            if after is not None:
                after(index)
    return seconds


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times faster we were, round by round."""
    return [their / our for our, their in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Median, 20th and 80th percentile (linear interpolation between the sorted values)."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(low, statistics.median(values), high)


def rounds_for(round_seconds: float, budget_seconds: float, least: int, most: int) -> int:
    """As many rounds as fit the budget, within limits; even, so that both orders weigh the same."""
    rounds = min(most, max(least, int(budget_seconds / max(round_seconds, 1e-9))))
    return rounds + rounds % 2


def once(side: Side) -> float:
    """Seconds of one call."""
    if side.before is not None:
        side.before()
    start = time.perf_counter()
    result = side.run()
    seconds = time.perf_counter() - start
    if side.check is not None:
        side.check(result)
    return seconds


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """As timeit does: a collection that hits one side only is not that side's cost."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
