"""The table of `fastclip bench`, as wide as the terminal: others' times over fastclip's."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastclip.benchmarking.contest import OURS
from fastclip.benchmarking.machine import Idleness, Machine
from fastclip.benchmarking.measure import Spread, paired_ratios, spread
from fastclip.benchmarking.peers import PEERS
from fastclip.benchmarking.report import WIDTH, milliseconds, number
from fastclip.benchmarking.runner import Result

LEAST = 80  # columns, however narrow the terminal
TIME, LIMIT, COLUMN = 9, 6, 10
HEAD = "clip_grad_norm_ of"
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


class Layout(NamedTuple):
    """What the width of a terminal has room for: the rivals, and whether `of limit`."""

    width: int
    title: int
    names: list[str]
    hidden: list[str]  # what there is no room for
    limit: bool


def fit(titles: Sequence[str], columns: int) -> Layout:
    """At least 80 columns and at most 100; what is left out first is least: `of limit`, then
    rivals from the last."""
    width = max(LEAST, min(WIDTH, columns))
    title = 1 + max([len(HEAD), *map(len, titles)])
    names, hidden = rivals(), []
    limit = title + TIME + LIMIT + COLUMN * len(names) <= width
    if not limit:
        hidden.append("of limit")
    room = (width - title - TIME - LIMIT * limit) // COLUMN
    return Layout(width, title, names[:room], [*hidden, *names[room:]], limit)


def heading(machine: Machine, backend: str, kernels: str, layout: Layout) -> str:
    # "torch foreach" on two lines, "timm" on the lower one.
    above = "".join(f"{name.rpartition(' ')[0]:>{COLUMN}}" for name in layout.names)
    below = "".join(f"{name.rpartition(' ')[2]:>{COLUMN}}" for name in layout.names)
    of, limit = (f"{word:>{LIMIT}}" if layout.limit else "" for word in ("of", "limit"))
    # Of an installed fastclip it is the version.
    commit = machine.commit if machine.commit.startswith(OURS) else f"commit {machine.commit}"
    return "\n".join(
        [
            f"{machine.cpu}, {machine.cores} cores, {machine.last_level_cache}, {machine.simd}, "
            f"{machine.memory_gib} GiB",
            f"torch {machine.torch}, Python {machine.python}, {machine.threads} threads, {commit}",
            f"backend {backend}: {kernels}",
            "",
            f"{'':<{layout.title}}{OURS:>{TIME}}{of}{above}".rstrip(),
            f"{HEAD:<{layout.title}}{'':>{TIME}}{limit}{below}".rstrip(),
            "-" * layout.width,
        ]
    )


def line(result: Result, layout: Layout) -> str:
    ours, found = result.timings[0], ratios(result)
    cells = "".join(f"{_cell(found.get(name)):>{COLUMN}}" for name in layout.names)
    share = "" if ours.of_floor is None else f"{ours.of_floor:.0%}"
    limit = f"{share:>{LIMIT}}" if layout.limit else ""
    time = milliseconds(ours.ms.median)
    return f"{result.title:<{layout.title}}{time:>{TIME}}{limit}{cells}".rstrip()


def footing(results: Sequence[Result], idle: Idleness, layout: Layout) -> str:
    """What columns and marks mean, every loss, who is not in the table, and how idle it was. Of
    times that something disturbed nothing is concluded."""
    lines = [
        "columns: that one's time over fastclip's, medians of paired ratios; above 1 fastclip is "
        "faster; < slower, ~ the rounds disagree"
    ]
    if layout.limit:
        lines.append(
            "of limit: the least time that the bytes take at torch's own best rates, over "
            "fastclip's"
        )
    if layout.hidden:
        lines.append(f"no room in {layout.width} columns for: {', '.join(layout.hidden)}")
    if idle.complaint() is None:
        lines += _standing(results)
    lines += [*_missing(results), _idleness(idle)]
    wrapped = (textwrap.fill(text, layout.width, subsequent_indent="  ") for text in lines)
    return "\n".join(["-" * layout.width, *wrapped])


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
        yield f"slower: {result.title}: {name} is {number(1 / ratio.median)} times as fast"


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


def _cell(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{number(ratio.median)}{MARKS[faster(ratio)]}"
