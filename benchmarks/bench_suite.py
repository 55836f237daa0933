"""The suite under pytest-benchmark: `make bench`.

pytest-benchmark times one function to the end before it begins the next, and a machine whose speed
drifts would show in the comparison. So each row is raced first, interleaved, by the project's own
runner; the tests then hand the recorded seconds of each side to pytest-benchmark through a timer
that replays them, one round a call. Paired ratios and limits stand in `extra_info`.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.recording import Recording
from benchmarks.rows import ROWS
from fastclip.benchmarking import memory, report
from fastclip.benchmarking.contest import OURS, Row


class Replay:
    """A timer for pytest-benchmark that shows recorded seconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def run(self, benchmark: Any, seconds: Sequence[float]) -> None:
        """One round a recorded call: from 0 on the clock to its seconds."""
        left = iter(seconds)

        def begin() -> None:
            self._now = 0.0

        def call() -> None:
            self._now = next(left)

        benchmark.pedantic(call, setup=begin, rounds=len(seconds), iterations=1)


REPLAY = Replay()
# Rows with a target first: where time runs out on a slow machine they are there.
ORDER = sorted(ROWS, key=lambda row: row.at_least is None)


@pytest.mark.benchmark(timer=REPLAY, disable_gc=False)
@pytest.mark.parametrize(
    ("row", "side"),
    [
        pytest.param(row, side, id=f"{row.name}-{side}")
        for row in ORDER
        for side in (OURS, *row.rivals)
    ],
)
def test_row(row: Row, side: str, recording: Recording, benchmark: Any, pytestconfig: Any) -> None:
    if row.big and not pytestconfig.getoption("--every"):
        pytest.skip("takes long: --every")
    if row.name not in recording.results and (reason := recording.why_not(row)):
        pytest.skip(reason)
    result = recording.race(row)
    if side in result.gaps:
        pytest.skip(result.gaps[side])
    timing = next(timing for timing in result.timings if timing.side == side)
    benchmark.group = row.title
    benchmark.extra_info.update(next(r for r in report.records(result) if r["side"] == side))
    REPLAY.run(benchmark, timing.seconds)


@pytest.mark.skipif(memory.why_not() is not None, reason=str(memory.why_not()))
@pytest.mark.parametrize("dtype", memory.DTYPES)
def test_extra_memory(dtype: str, recording: Recording) -> None:
    assert recording.memory(dtype).met
