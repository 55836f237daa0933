"""The backends for GPUs against torch, apex and TransformerEngine, where importable.

    python -m benchmarks.gpu                     # five to eight minutes; needs torch, numpy and
                                                 # what the backends need: triton, nvcc
    python -m benchmarks.gpu --csv benchmarks/results/NAME.csv

Without a GPU it says so and ends. A row: microseconds on the device between two events around the
call, microseconds the host takes to issue it, bytes that the task needs over the device time as a
share of the card's own copy rate (1 GiB, `copy_`), all medians of interleaved rounds.
"""

import argparse
import csv
import importlib
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastclip import backends
from fastclip.benchmarking.machine import describe
from fastclip.benchmarking.models import gpt2

BACKENDS = ("triton", "cuda")
SECONDS = 420  # then no further row is begun
ROUNDS = 30
LARGE: list[tuple[int, ...]] = [(4096, 4096)] * 60  # 1.007 G elements


@dataclass(frozen=True)
class Work:
    """A list of gradients and what is done with it; `passes`: bytes needed over bytes of it."""

    name: str
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    clips: bool
    passes: float
    unscale: bool = False


def workloads() -> list[Work]:
    found = []
    lists: dict[str, list[tuple[int, ...]]] = {
        "gpt2": gpt2(),
        "2000x512": [(512,)] * 2000,
        "148x4096": [(4096,)] * 148,
        "1G": LARGE,
    }
    for name, shapes in lists.items():
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{name}-{str(dtype).removeprefix('torch.')}"
            found.append(Work(label, shapes, dtype, False, 1.0))
            found.append(Work(f"{label}-clipped", shapes, dtype, True, 3.0))
    found.append(Work("gpt2-float16-amp", lists["gpt2"], torch.float16, True, 3.0, unscale=True))
    return found


Call = Callable[[list[Tensor], float], object]


def competitors(work: Work) -> dict[str, Call]:
    inverse = torch.full((), 1.0, device="cuda") if work.unscale else None
    found = {f"fastclip-{name}": _fastclip(name, inverse) for name in usable()}
    if inverse is not None:
        found["torch"] = lambda grads, norm: _torch_amp(grads, norm, inverse)
        return found
    found["torch"] = _torch_foreach
    if importlib.util.find_spec("amp_C"):
        found["apex"] = _multi_tensor("amp_C", "apex.multi_tensor_apply")
    if importlib.util.find_spec("transformer_engine_torch"):
        found["transformer_engine"] = _multi_tensor(
            "transformer_engine_torch", "transformer_engine.pytorch.optimizers"
        )
    return found


def usable() -> list[str]:
    reasons = backends.available()
    return [name for name in BACKENDS if reasons[name] is None]


def _fastclip(name: str, inverse: Tensor | None) -> Call:
    clip = backends.get(name).quick_clip_
    assert clip, name
    return lambda grads, norm: clip(grads, 2.0, norm, inverse)


def _torch_foreach(grads: list[Tensor], norm: float) -> Tensor:
    total = torch.nn.utils.get_total_norm(grads, 2.0, foreach=True)
    coef = (norm / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, coef)
    return total


def _torch_amp(grads: list[Tensor], norm: float, inverse: Tensor) -> Tensor:
    found_inf = torch.zeros((), device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
    return _torch_foreach(grads, norm)


def _multi_tensor(operators: str, applier: str) -> Call:
    """Norm and rescale as Megatron-LM does them: one wait for the device in between."""
    ops = importlib.import_module(operators)
    apply = importlib.import_module(applier).multi_tensor_applier

    def call(grads: list[Tensor], norm: float) -> Tensor:
        flag = torch.zeros(1, dtype=torch.int, device="cuda")
        total, _ = apply(ops.multi_tensor_l2norm, flag, [grads], False)
        coef = norm / (float(total) + 1e-6)
        if coef < 1:
            apply(ops.multi_tensor_scale, flag, [grads, grads], coef)
        return total

    return call


def copy_rate() -> float:
    """Bytes a second, read and written, of the fastest of ten copies of 1 GiB."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    best = min(device_us(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.nbytes / (best * 1e-6)


def device_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000


def host_us(call: Callable[[], object]) -> float:
    """How long the call keeps the host while the device is busy with something else."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(work: Work, rate: float) -> list[dict[str, Any]]:
    grads = [torch.empty(shape, device="cuda", dtype=work.dtype) for shape in work.shapes]
    n_bytes = sum(grad.nbytes for grad in grads)
    norm = 1e-3 if work.clips else 1e9

    def fill() -> None:
        for grad in grads:
            grad.fill_(0.5)

    calls = competitors(work)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 3):
        for name, call in calls.items():
            fill()
            on_device = device_us(lambda call=call: call(grads, norm))  # type: ignore[misc]
            fill()
            on_host = host_us(lambda call=call: call(grads, norm))  # type: ignore[misc]
            if round_ >= 3:  # the first ones compile and warm up
                times[name].append((on_device, on_host))
    rows = []
    for name, pairs in times.items():
        us, host = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = work.passes * n_bytes / (us * 1e-6) / rate
        rows.append(
            {
                "workload": work.name,
                "competitor": name,
                "n_bytes": n_bytes,
                "device_us": round(us, 2),
                "host_us": round(host, 2),
                "share_of_copy_rate": round(share, 4),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="The backends for GPUs.")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: skipped, torch finds no CUDA device here")
        return 0
    for name in BACKENDS:
        if reason := backends.available()[name]:
            print(f"fastclip-{name}: left out, {reason}")
    begin = time.monotonic()
    rate = copy_rate()
    card = torch.cuda.get_device_name()
    print(f"{card}: copies at {rate / 1e9:.0f} GB/s; torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    for work in workloads():
        if time.monotonic() - begin > SECONDS:
            print(f"{work.name}: left out, {SECONDS} s are over")
            continue
        for row in measure(work, rate):
            rows.append(row)
            print(
                f"{row['workload']:<28}{row['competitor']:<20}{row['device_us']:>10.1f} us device"
                f"{row['host_us']:>10.1f} us host{row['share_of_copy_rate']:>8.0%} of copy"
            )
        torch.cuda.empty_cache()
    if arguments.csv:
        _write(arguments.csv, rows, card, rate)
    return 0


def _version(package: str) -> str:
    found = importlib.util.find_spec(package)
    return importlib.metadata.version(package) if found else ""


def _write(path: Path, rows: list[dict[str, Any]], card: str, rate: float) -> None:
    about = describe()
    facts = {
        "card": card,
        "copy_gbs": round(rate / 1e9, 1),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "date": about.date,
        "commit": about.commit,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
