"""Results as a table of 100 columns, as CSV rows, as JSON."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastclip.benchmarking.contest import OURS
from fastclip.benchmarking.machine import Idleness, Machine
from fastclip.benchmarking.measure import Spread
from fastclip.benchmarking.memory import MemoryResult
from fastclip.benchmarking.runner import Result, Timing

WIDTH = 100
TITLE = 36
HEADER = (
    f"{'workload':<{TITLE}}{'ratio':>8}  {'20th - 80th %':<15}{'at least':>9}{'of limit':>9}"
    f"{'time':>11}"
)

SLOWER, LEVEL = "slower", "~"

AnyResult = Result | MemoryResult


@dataclass(frozen=True)
class Run:
    """Everything one invocation found out."""

    machine: Machine
    backend: str
    kernels: str
    before: Idleness
    during: Idleness
    results: Sequence[AnyResult]


def heading(machine: Machine, backend: str, kernels: str) -> str:
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.last_level_cache}, {machine.simd}, "
        f"{machine.memory_gib} GiB",
        f"torch {machine.torch}, Python {machine.python}, {machine.threads} threads, "
        f"commit {machine.commit}",
        f"backend {backend}: {kernels}",
        "",
        HEADER,
        "-" * WIDTH,
    ]
    return "\n".join(lines)


def line(result: AnyResult) -> str:
    """fastclip's own line."""
    if isinstance(result, MemoryResult):
        at_most = f"at most {size(result.allowed)}"
        text = f"{result.title:<{TITLE}}{'':>25}{at_most:>18}{size(result.ours):>11}"
        return f"{text}  {_verdict(result)}".rstrip()
    text = _numbers(result.title, result.ours, result.at_least, "host" if result.host else "")
    return f"{text}  {_verdict(result)}".rstrip()


def peer_lines(result: AnyResult) -> list[str]:
    """One line a rival, in the columns of `line`, and one for each that is missing."""
    if isinstance(result, MemoryResult):
        rivals = [name for name in result.extra if name != OURS]
        lines = [f"{f'    {name}':<79}{size(result.extra[name]):>11}" for name in rivals]
    else:
        lines = [_rival(timing) for timing in result.timings[1:]]
    missing = [f"{f'    {name}':<{TITLE}}  {reason}" for name, reason in result.gaps.items()]
    return [*lines, *missing]


def footing(results: Iterable[AnyResult]) -> str:
    """The rates behind the limits, what the columns mean, and which rows are losses."""
    races = [one for one in results if isinstance(one, Result)]
    cold = [one.rates for one in races if one.rates and not one.row.warm]
    lines = ["-" * WIDTH]
    if cold:
        rates = ", ".join(
            f"{name} {_range([getattr(rates, name) for rates in cold])}"
            for name in ("read", "write", "rewrite", "copy")
        )
        lines.append(f"torch's own kernels, GB/s: {rates}")
    lines += [
        "ratio: the baseline's time over this one's, median of pairs of the same round; baseline:",
        "the fastest rival, or the faster of torch's two; of limit: least bytes at the rates above",
        "(host: they take less than a fifth of the fastest time)",
        *_losses(races),
    ]
    return "\n".join(lines)


def write_csv(path: Path, run: Run) -> None:
    rows = [{**row, **_about(run)} for result in run.results for row in records(result)]
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def as_json(run: Run) -> str:
    report = {
        "machine": asdict(run.machine),
        "backend": run.backend,
        "kernels": run.kernels,
        "idle": {"before": asdict(run.before), "during": asdict(run.during)},
        "rows": [row for result in run.results for row in records(result)],
    }
    return json.dumps(report, indent=2)


def records(result: AnyResult) -> list[dict[str, object]]:
    """One flat row a side, fastclip's first, and one for each gap."""
    if isinstance(result, MemoryResult):
        return _memory_records(result)
    sides = [{**_row(result), **_timing(result, timing)} for timing in result.timings]
    gaps = [{**_row(result), "side": name, "gap": why} for name, why in result.gaps.items()]
    return [*sides, *gaps]


def _memory_records(result: MemoryResult) -> list[dict[str, object]]:
    row: dict[str, object] = {
        "name": result.name,
        "title": result.title,
        "workload": result.workload,
        "dtype": result.dtype,
        "clips": True,
    }
    sides = [{**row, "side": name, "extra_bytes": extra} for name, extra in result.extra.items()]
    sides[0] |= {"met": result.met, "extra_bytes_allowed": result.allowed}
    return [*sides, *({**row, "side": name, "gap": why} for name, why in result.gaps.items())]


def _row(result: Result) -> dict[str, object]:
    row, rates = result.row, result.rates
    return {
        "name": row.name,
        "title": row.title,
        "workload": row.workload,
        "dtype": row.dtype,
        "clips": row.clips,
        "warm": row.warm,
        "n_tensors": result.n_tensors,
        "n_bytes": result.n_bytes,
        "reads": row.reads,
        "writes": row.writes,
        "baseline": result.baseline,
        "rounds": result.rounds,
        "limit": digits(result.limit),
        "floor_ms": digits(result.floor_ms),
        **{
            f"{name}_gbs": digits(rate / 1e9)
            for name, rate in (asdict(rates) if rates else {}).items()
        },
    }


def _timing(result: Result, timing: Timing) -> dict[str, object]:
    return {
        "side": timing.side,
        **_spread("ratio", timing.ratio),
        **_spread("ms", timing.ms),
        "of_floor": digits(timing.of_floor),
        "note": timing.note,
        **({"at_least": result.at_least, "met": result.met} if timing.side == OURS else {}),
    }


def _about(run: Run) -> dict[str, object]:
    """What lets a row of the CSV stand alone: the machine, and how idle it was."""
    return {
        **asdict(run.machine),
        "backend": run.backend,
        "kernels": run.kernels,
        "busy_cores": digits(run.during.busy_cores),
        "region_us": round(max(run.before.region_us, run.during.region_us)),
    }


def _spread(name: str, spread: Spread) -> dict[str, object]:
    low, median, high = (digits(value) for value in spread)
    return {name: median, f"{name}_p20": low, f"{name}_p80": high}


def _numbers(name: str, timing: Timing, at_least: float | None = None, unlimited: str = "") -> str:
    ratio = timing.ratio
    spread = f"{number(ratio.low)} - {number(ratio.high)}"
    target = "" if at_least is None else times(at_least)
    share = unlimited if timing.of_floor is None else f"{timing.of_floor:.0%}"
    return (
        f"{name:<{TITLE}}{times(ratio.median):>8}  {spread:<15}{target:>9}{share:>9}"
        f"{milliseconds(timing.ms.median):>11}"
    )


def _rival(timing: Timing) -> str:
    outside = " (out of place)" if "out of place" in timing.note else ""
    return _numbers(f"    {timing.side}{outside}", timing)


def _verdict(result: AnyResult) -> str:
    if isinstance(result, Result) and result.met is None:
        return _outcome(result.ratio)
    return "ok" if result.met else "below"


def _losses(races: Sequence[Result]) -> list[str]:
    """Every row in which some other side was faster, by how much, and those left open."""
    lost, level = [], []
    for result in races:
        best = min(result.timings[1:], key=lambda timing: result.against(timing).median)
        ratio = result.against(best)
        if (outcome := _outcome(ratio)) == SLOWER:
            lost.append(f"  {result.name}: {best.side} is {number(1 / ratio.median)} times faster")
        elif outcome == LEVEL:
            level.append(f"  {result.name}: {best.side}")
    if not races:
        return []
    lines = [f"a rival was faster in {len(lost)} of {len(races)} rows{':' if lost else ''}", *lost]
    if level:
        lines += [f"a rival was ahead within the spread ({LEVEL}) in {len(level)}:", *level]
    return lines


def _outcome(ratio: Spread) -> str:
    """How fastclip did against one rival: lost is a ratio whose 80th percentile is below 1, and
    only by more than the two digits that are printed."""
    if ratio.median >= 1:
        return ""
    return SLOWER if ratio.high < 1 and number(1 / ratio.median) != number(1.0) else LEVEL


def digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(value: float) -> str:
    return f"{number(value)}x"


def milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def size(n_bytes: int) -> str:
    mib = n_bytes / (1 << 20)
    return f"{n_bytes / 1024:.0f} KiB" if mib < 4 else f"{mib:.0f} MiB"


def _range(values: Sequence[float]) -> str:
    return f"{min(values) / 1e9:.0f}-{max(values) / 1e9:.0f}"
