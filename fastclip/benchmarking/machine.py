"""The machine behind the numbers: its name for the record, and whether it is idle enough."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import fastclip

STAT = Path("/proc/stat")
BUSY_CORES = 0.15  # an idle machine shows 0.00 - 0.05
SLOW_REGION_US = 500.0  # a parallel region takes about 20 us on idle cores, 8000 beside a busy one


@dataclass(frozen=True)
class Machine:
    """What a committed number is worth nothing without."""

    date: str
    commit: str
    cpu: str
    cores: int
    last_level_cache: str
    memory_gib: int
    simd: str
    system: str
    python: str
    torch: str
    threads: int


@dataclass(frozen=True)
class Idleness:
    """How much of the machine was left to us, over the time since `others` began to watch."""

    load_average: float
    busy_cores: float | None
    region_us: float

    def complaint(self) -> str | None:
        """One sentence if the times cannot be trusted. The load average is only reported: it
        remembers minutes, our own last run included."""
        reasons = []
        if self.busy_cores is not None and self.busy_cores > BUSY_CORES:
            reasons.append(f"other programs kept {self.busy_cores:.2f} cores busy")
        if self.region_us > SLOW_REGION_US:
            reasons.append(f"a parallel region takes {self.region_us:.0f} us (idle: about 20)")
        return f"the machine is not idle: {' and '.join(reasons)}" if reasons else None


class Others:
    """Watches how many cores other programs (and the host, by steal) keep busy."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before = self._seconds()

    def busy_cores(self) -> float | None:
        """The average since this object was made; None where /proc/stat is missing."""
        now = self._seconds()
        if self._before is None or now is None:
            return None
        return max(0.0, now - self._before) / (time.monotonic() - self._start)

    def idleness(self) -> Idleness:
        busy = self.busy_cores()  # before our own calibration adds to it
        return Idleness(os.getloadavg()[0], busy, region_us())

    @staticmethod
    def _seconds() -> float | None:
        if not STAT.exists():
            return None
        fields = [int(field) for field in STAT.read_text().splitlines()[0].split()[1:]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
        ticks = user + nice + system + irq + softirq + steal
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return ticks / os.sysconf("SC_CLK_TCK") - own


def available_bytes() -> int | None:
    """Memory that programs can still have without swapping; None where /proc/meminfo is missing."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    fields = dict(line.split(":") for line in info.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def describe() -> Machine:
    return Machine(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        commit=_commit(),
        cpu=_cpu(),
        cores=n_cores(),
        last_level_cache=_last_level_cache(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        simd=torch.backends.cpu.get_cpu_capability(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def n_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def region_us(repeats: int = 300) -> float:
    """The 95th percentile of a multiply just big enough that torch splits it over threads."""
    tensor = torch.ones(40_000)  # torch's grain is 32,768 elements
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        tensor.mul_(1.0)
        times.append(time.perf_counter() - start)
    return sorted(times)[int(0.95 * repeats)] * 1e6


def _commit() -> str:
    """The short hash, marked when tracked files differ from it; of an installed fastclip, which
    may lie in somebody else's repository, the version."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    here = Path(__file__).parents[2]
    if not (here / "csrc").is_dir():
        return f"fastclip {fastclip.__version__}"
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no git, or not a checkout
    return done.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def last_level_bytes() -> int:
    """The size of the last-level cache; 32 MiB where the system does not tell."""
    size = _last_level_cache().split()[-1]
    kib = size.removesuffix("K")
    return int(kib) << 10 if kib.isdecimal() and kib != size else 32 << 20


def _last_level_cache() -> str:
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    if not folders:
        return "unknown"
    level = (folders[-1] / "level").read_text().strip()
    return f"L{level} {(folders[-1] / 'size').read_text().strip()}"
