"""Results as a table of 100 columns, as CSV rows, as JSON."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fastclip.benchmarking.machine import Idleness, Machine
from fastclip.benchmarking.memory import MemoryResult
from fastclip.benchmarking.runner import Result

WIDTH = 100
VERDICTS = {True: "ok", False: "below", None: ""}
HEADER = (
    f"{'workload':<36}{'ratio':>8}  {'quartiles':<13}{'at least':>8}{'limit':>8}"
    f"{'torch':>9}{'fastclip':>9}"
)


@dataclass(frozen=True)
class Run:
    """Everything one invocation found out."""

    machine: Machine
    backend: str
    kernels: str
    before: Idleness
    during: Idleness
    results: list[Result | MemoryResult]


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


def line(result: Result | MemoryResult) -> str:
    return _memory_line(result) if isinstance(result, MemoryResult) else _race_line(result)


def _race_line(result: Result) -> str:
    ratio = result.ratio
    quartiles = f"{_number(ratio.low)} - {_number(ratio.high)}"
    text = (
        f"{result.title:<36}{_times(ratio.median):>8}  {quartiles:<13}"
        f"{_times(result.at_least):>8}{_times(result.limit):>8}"
        f"{_ms(result.baseline_ms):>9}{_ms(result.ours_ms):>9}  {VERDICTS[result.met]}"
    )
    return text.rstrip()


def _memory_line(result: MemoryResult) -> str:
    at_most = f"at most {_size(result.allowed)}"
    return (
        f"{result.title:<36}{'':>8}  {at_most:>29}"
        f"{_size(result.torch):>9}{_size(result.ours):>9}  {VERDICTS[result.met]}"
    )


def footing(results: Iterable[Result | MemoryResult]) -> str:
    """The rates behind the limits, and what the columns mean."""
    probed = [r for r in results if isinstance(r, Result) and r.read_gbs and r.write_gbs]
    lines = ["-" * WIDTH]
    if probed:
        reads = [r.read_gbs for r in probed if r.read_gbs]
        writes = [r.write_gbs for r in probed if r.write_gbs]
        lines.append(
            f"limit: bytes over the rates of torch in the same rounds: sum or aminmax "
            f"{_range(reads)} GB/s, mul_ {_range(writes)} GB/s"
        )
    lines.append("ratio: median of paired ratios, torch's time over fastclip's; times are medians")
    return "\n".join(lines)


def write_csv(path: Path, run: Run) -> None:
    rows = [_record(run, result) for result in run.results]
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
        "rows": [_fields(result) for result in run.results],
    }
    return json.dumps(report, indent=2)


def _record(run: Run, result: Result | MemoryResult) -> dict[str, object]:
    """A flat row that can stand alone: the result, then the machine, then how idle it was."""
    return {
        **_fields(result),
        **asdict(run.machine),
        "backend": run.backend,
        "kernels": run.kernels,
        "busy_cores": _digits(run.during.busy_cores),
        "region_us": round(max(run.before.region_us, run.during.region_us)),
    }


def _fields(result: Result | MemoryResult) -> dict[str, object]:
    if isinstance(result, MemoryResult):
        extra = {"extra_bytes": result.ours, "extra_bytes_torch": result.torch}
        allowed = {"extra_bytes_allowed": result.allowed}
        return {"name": result.name, "title": result.title, "met": result.met, **extra, **allowed}
    return {
        "name": result.name,
        "title": result.title,
        "met": result.met,
        "ratio": _digits(result.ratio.median),
        "ratio_low": _digits(result.ratio.low),
        "ratio_high": _digits(result.ratio.high),
        "at_least": result.at_least,
        "limit": _digits(result.limit),
        "rounds": result.rounds,
        "baseline": result.baseline,
        "baseline_ms": _digits(result.baseline_ms),
        "fastclip_ms": _digits(result.ours_ms),
        "n_bytes": result.n_bytes,
        "read_gbs": _digits(result.read_gbs),
        "write_gbs": _digits(result.write_gbs),
    }


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{_number(value)}x"


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def _range(values: list[float]) -> str:
    return f"{min(values):.0f}-{max(values):.0f}"


def _size(n_bytes: int) -> str:
    mib = n_bytes / (1 << 20)
    return f"{n_bytes / 1024:.0f} KiB" if mib < 4 else f"{mib:.0f} MiB"
