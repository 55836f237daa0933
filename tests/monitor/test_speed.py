"""What a record costs: a million replay within a minute, and large windows cost little more."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fastclip.monitor import JSONL, Monitor, RobustSpike
from tests.monitor.making import healthy, of_loss

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer takes its time"),
]


def seconds(call: Callable[[], object], tries: int = 5) -> float:
    """Of the processor, in the best of some tries."""

    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(tries))


def test_a_million_records_take_under_a_minute(tmp_path: Path) -> None:
    """A log as most have it: loss, norm, clipping, learning rate, loss scale."""
    count, log = 3000, JSONL(tmp_path / "run.jsonl")
    for record in healthy(count):
        sparse = replace(record, val_loss=None, activation_max=None, param_norm=None)
        log.write(replace(sparse, update_ratio=None), [])
    each = seconds(lambda: Monitor().replay(log)) / count
    assert each < 60e-6, f"{each * 1e6:.1f} us"


def test_a_hundred_times_the_window_costs_little_more() -> None:
    losses = [record.loss for record in healthy(2000)]
    filling, rest = of_loss(losses * 5), of_loss(losses)

    def cost(window: int) -> float:
        """The last 2,000 of 12,000 values, so that the window is full."""
        detector = RobustSpike("loss", window=window)
        state = detector.init()
        for record in filling:
            state, _ = detector(state, record)
        full = state

        def judge() -> None:
            state = full
            for record in rest:
                state, _ = detector(state, record)

        return seconds(judge)

    small, large = cost(100), cost(10_000)
    assert large < 8 * small, f"{small:.4f} s and {large:.4f} s"  # 2 to 3; copies would take 50
