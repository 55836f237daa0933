"""The table of `fastclip bench`, 100 columns wide: others' times over fastclip's."""

import textwrap
from collections.abc import Iterator, Sequence

from fastclip.benchmarking.machine import Idleness, Machine
from fastclip.benchmarking.measure import Spread, paired_ratios, spread
from fastclip.benchmarking.peers import PEERS
from fastclip.benchmarking.report import TITLE, WIDTH, milliseconds, number
from fastclip.benchmarking.runner import Result

TIME, LIMIT = 11, 7
MARKS = {True: "", False: "<", None: "~"}


def rivals() -> list[str]:
    """Those who have a column: whoever is installed here."""
    return [peer.name for peer in PEERS if peer.missing() is None]


def ratios(result: Result) -> dict[str, Spread]:
    """By rival: its time over fastclip's, paired by round."""
    ours, *others = result.timings
    return {other.side: spread(paired_ratios(ours.seconds, other.seconds)) for other in others}


def faster(ratio: Spread) -> bool | None:
    """Whether fastclip is, or None if the 20th and 80th percentile disagree."""
    return True if ratio.low > 1 else False if ratio.high < 1 else None


def heading(machine: Machine, backend: str, kernels: str) -> str:
    names = rivals()
    width = _column(names)
    # "torch foreach" on two lines, "timm" on the lower one.
    above = "".join(f"{name.rpartition(' ')[0][: width - 1]:>{width}}" for name in names)
    below = "".join(f"{name.rpartition(' ')[2][: width - 1]:>{width}}" for name in names)
    return "\n".join(
        [
            f"{machine.cpu}, {machine.cores} cores, {machine.last_level_cache}, {machine.simd}, "
            f"{machine.memory_gib} GiB",
            f"torch {machine.torch}, Python {machine.python}, {machine.threads} threads, "
            f"{machine.commit}",
            f"backend {backend}: {kernels}",
            "",
            f"{'':<{TITLE}}{'fastclip':>{TIME}}{'of':>{LIMIT}}{above}",
            f"{'clip_grad_norm_ of':<{TITLE}}{'':>{TIME}}{'limit':>{LIMIT}}{below}",
            "-" * WIDTH,
        ]
    )


def line(result: Result) -> str:
    names = rivals()
    width = _column(names)
    ours, found = result.timings[0], ratios(result)
    cells = "".join(f"{_cell(found.get(name)):>{width}}" for name in names)
    share = "" if ours.of_floor is None else f"{ours.of_floor:.0%}"
    time = milliseconds(ours.ms.median)
    return f"{result.title:<{TITLE}}{time:>{TIME}}{share:>{LIMIT}}{cells}".rstrip()


def footing(results: Sequence[Result], idle: Idleness) -> str:
    """What columns and marks mean, every loss, who is not in the table, and how idle it was."""
    lines = [
        "columns: that one's time over fastclip's, medians of paired ratios; above 1 fastclip is "
        "faster",
        "of limit: the least time that the bytes take at torch's own best rates, over fastclip's",
        *_standing(results),
        *_missing(results),
        _idleness(idle),
    ]
    wrapped = (textwrap.fill(text, WIDTH, subsequent_indent="  ") for text in lines)
    return "\n".join(["-" * WIDTH, *wrapped])


def _standing(results: Sequence[Result]) -> Iterator[str]:
    """How many comparisons went which way, and each that fastclip lost."""
    found = [(result, name, ratio) for result in results for name, ratio in ratios(result).items()]
    won, lost, even = (
        [one for one in found if faster(one[2]) is way] for way in (True, False, None)
    )
    yield (
        f"fastclip is faster in {len(won)} of {len(found)} comparisons, slower (<) in {len(lost)}; "
        f"in {len(even)} (~) the rounds disagree"
    )
    for result, name, ratio in lost:
        yield f"slower: {result.title}: {name} takes {ratio.median:.2f} of its time"


def _missing(results: Sequence[Result]) -> Iterator[str]:
    """A line for each gap, or one for all rows that have the same."""
    rows: dict[tuple[str, str], int] = {}
    for result in results:
        for gap in result.gaps.items():
            rows[gap] = rows.get(gap, 0) + 1
    for (name, reason), count in rows.items():
        where = "" if count == len(results) else f" in {count} of {len(results)} rows"
        yield f"not compared{where}: {name} ({reason})"


def _idleness(idle: Idleness) -> str:
    complaint = idle.complaint()
    if complaint is not None:
        return f"warning: {complaint}; such times are not to be trusted"
    if idle.busy_cores is None:
        return "whether other programs ran beside this cannot be told here"
    return f"idle: other programs kept {idle.busy_cores:.2f} cores busy"


def _column(names: Sequence[str]) -> int:
    return min(10, (WIDTH - TITLE - TIME - LIMIT) // max(1, len(names)))


def _cell(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{number(ratio.median)}{MARKS[faster(ratio)]}"
