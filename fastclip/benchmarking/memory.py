"""Extra memory of a clip: the peak above what the gradients and everything before it occupy.

Measured on the whole process by the kernel (VmHWM), in a process of its own, so that neither a
library's own accounting nor memory left free by an earlier benchmark can hide anything. Before
the call: a small clip has loaded the library and started the threads, malloc has returned its
free pages, and the high-water mark is reset. Needs Linux. Right to a few KiB on a recent kernel
(6.18), to about 0.25 MiB on one that counts pages in batches.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import fastclip
from fastclip.benchmarking.contest import FULL, OURS, QUICK, Size
from fastclip.benchmarking.peers import OURSELVES, PEERS, Peer
from fastclip.benchmarking.workloads import Clip, clip

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
ALLOWANCE = 1 << 20
TABLE_ROW = 5 * 8  # five float64 columns
DTYPES = ("float32", "bfloat16", "float16")
WORKLOAD = "gpt2-small"


@dataclass(frozen=True)
class MemoryResult:
    """Bytes above the gradients at the worst moment of one clipping call: `extra`, per side, ours
    first; `gaps` says of each peer that takes no part why."""

    name: str
    title: str
    workload: str
    dtype: str
    extra: dict[str, int]
    gaps: dict[str, str]
    allowed: int

    @property
    def ours(self) -> int:
        return self.extra[OURS]

    @property
    def met(self) -> bool:
        return self.ours <= self.allowed


def why_not() -> str | None:
    """Why memory cannot be measured here, or None if it can."""
    return None if CLEAR_REFS.exists() else f"extra memory needs Linux's {CLEAR_REFS}"


def extra_bytes(call: Callable[[], object]) -> int:
    """By how much `call` raised the peak of this process's resident memory."""
    _return_free_pages()
    CLEAR_REFS.write_text("5")  # resets VmHWM to the present size
    before = _status_kib("VmRSS")
    kept = call()
    peak = _status_kib("VmHWM")
    del kept
    return max(0, peak - before) * 1024


def run_in_child(dtype: str, threads: int, backend: str | None, quick: bool) -> MemoryResult:
    """Measures one dtype in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "fastclip.benchmarking.memory",
        dtype,
        "--threads",
        str(threads),
    ]
    if backend is not None:
        command += ["--backend", backend]
    if quick:
        command.append("--quick")
    root = Path(__file__).resolve().parents[2]  # where `fastclip` is found
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring memory for {dtype} failed:\n{done.stderr.strip()}")
    return MemoryResult(**json.loads(done.stdout))


def measure(dtype: str, size: Size) -> MemoryResult:
    """Both passes (measure, rescale) of a clip of GPT-2's gradients, by fastclip and each peer."""
    # Kept alive until the end: once freed, its pages could serve the call that is measured.
    warm_up = clip([(1 << 20,), (1000, 7)], getattr(torch, dtype), clips=True)
    problem = clip(size.shapes(WORKLOAD), getattr(torch, dtype), clips=True)
    extra, gaps = {}, {}
    for peer in (OURSELVES, *PEERS):
        if reason := peer.why_not(problem, size.memory_bytes):
            gaps[peer.name] = reason
        else:
            extra[peer.name] = _peak(peer, warm_up, problem)
    allowed = TABLE_ROW * problem.n_tensors + ALLOWANCE
    title = f"extra memory, {dtype}, clipped"
    return MemoryResult(f"memory-{dtype}", title, WORKLOAD, dtype, extra, gaps, allowed)


def _peak(peer: Peer, warm_up: Clip, problem: Clip) -> int:
    first, side = peer.side(warm_up), peer.side(problem)
    warm_up.restore()
    problem.restore()
    first.run()
    results = []
    peak = extra_bytes(lambda: results.append(side.run()))
    if side.check is not None:
        side.check(results[0])
    return peak


def _return_free_pages() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not need it
    if trim is not None:
        trim(0)


def _status_kib(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{STATUS} has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fastclip.benchmarking.memory", description=__doc__
    )
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with fastclip.backend(args.backend) if args.backend else nullcontext():
        result = measure(args.dtype, QUICK if args.quick else FULL)
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
