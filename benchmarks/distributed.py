"""What clipping costs under torch.distributed: gloo ranks on this machine, one thread each.

    python -m benchmarks.distributed                 # 2 and 4 ranks, about 90 seconds
    python -m benchmarks.distributed --csv benchmarks/results/NAME.csv
    python -m benchmarks.distributed --check         # exit status 1 if a row misses its target
    python -m benchmarks.distributed --quick         # small sizes: does everything run?

Times are those of rank 0, from a barrier until its call is done; ratios are of the same round.
Collectives and the bytes that a rank puts into them are counted in one call under the profiler.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastclip
from benchmarks.gpt import GPT
from fastclip.benchmarking import machine
from fastclip.benchmarking.contest import OURS
from fastclip.benchmarking.measure import Side, interleave, paired_ratios, spread
from fastclip.benchmarking.models import Shape, gpt2, many
from fastclip.benchmarking.workloads import gradients
from fastclip.distributed import Attribution, attribution_hook

MAX_NORM = 1e9  # nothing is clipped: to measure is what costs
N_DTENSORS = 300
VOCABULARY = 2048
# Bytes of an element, by the profiler's names.
ITEM = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "unsigned char": 1,
}


class Size(NamedTuple):
    small: list[Shape]
    gpt2: list[Shape]
    gpt: tuple[int, int]  # width and blocks of the model that is trained
    rounds: int


# As many tensors as GPT-2 medium has, a quarter as wide: 22 M elements.
FULL = Size(many(N_DTENSORS, 1024), gpt2(width=256, blocks=24), (128, 4), rounds=100)
QUICK = Size(many(20, 16), gpt2(width=32, blocks=1, vocabulary=64), (32, 1), rounds=2)


class Traffic(NamedTuple):
    """What one rank sends in one call."""

    collectives: int
    n_bytes: int


class Pair(NamedTuple):
    """Two sides of a contest that make a row. The targets are those of the full size."""

    name: str
    title: str
    baseline: str
    ours: str
    at_least: float | None = None


def traffic(call: Callable[[], object]) -> Traffic:
    """Of one call. A collective: all ranks have to come here."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sent = [event["args"] for event in events if event.get("name", "").startswith("gloo:")]
    n_bytes = sum(
        ITEM[kind] * math.prod(shape)
        for args in sent
        for kind, shape in zip(args["Input type"], args["Input Dims"], strict=True)
    )
    return Traffic(len(sent), n_bytes)


def sharded(shapes: Sequence[Shape], ranks: int) -> list[nn.Parameter]:
    """Parameters and gradients along their first dimension, as FSDP2 has them."""
    mesh = init_device_mesh("cpu", (ranks,))
    parameters = []
    for grad in gradients(shapes):
        shards = distribute_tensor(grad, mesh, [Shard(0)])
        parameter = nn.Parameter(torch.zeros_like(shards))
        parameter.grad = shards
        parameters.append(parameter)
    return parameters


def norms(shapes: Sequence[Shape], ranks: int) -> list[Side]:
    """The total norm of DTensors, as a plain number on every rank."""
    parameters = sharded(shapes, ranks)
    whole = torch.cat([grad.view(-1) for grad in gradients(shapes)])
    expected = torch.linalg.vector_norm(whole, dtype=torch.float64).item()

    def by_torch() -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def check(norm: Tensor) -> None:
        if abs(norm.item() / expected - 1) > 1e-3:
            raise RuntimeError(f"a norm of {norm.item():g}, where {expected:g} is right")

    ours = partial(fastclip.clip_grad_norm_, parameters, MAX_NORM)
    return [
        Side("torch", by_torch, dist.barrier, check),
        Side(OURS, ours, dist.barrier, check),
    ]


class _Training:
    """Backward, clip and step of a small GPT under DDP."""

    def __init__(self, size: tuple[int, int], hook: bool) -> None:
        torch.manual_seed(0)
        model = GPT(*size, VOCABULARY, context=64)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if hook:
            self.model.register_comm_hook(Attribution(self.model), attribution_hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.clipper = fastclip.GradClipper(self.model, MAX_NORM)
        self.tokens = torch.randint(0, VOCABULARY, (2, 65))
        self._loss = torch.zeros(())

    def before(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1]).flatten(0, 1)
        self._loss = F.cross_entropy(logits, self.tokens[:, 1:].flatten())
        dist.barrier()

    def unclipped(self) -> None:
        self._loss.backward()
        self.optimizer.step()

    def by_torch(self) -> None:
        self._loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def by_fastclip(self) -> None:
        self._loss.backward()
        self.clipper.step(self.optimizer)


def training(size: tuple[int, int]) -> list[Side]:
    plain, hooked = _Training(size, hook=False), _Training(size, hook=True)
    return [
        Side("unclipped", plain.unclipped, plain.before),
        Side("torch", plain.by_torch, plain.before),
        Side(OURS, plain.by_fastclip, plain.before),
        Side("hook", hooked.by_fastclip, hooked.before),
    ]


def contests(size: Size, ranks: int) -> list[tuple[list[Pair], Callable[[], list[Side]]]]:
    n_small, n_gpt2 = len(size.small), len(size.gpt2)
    small = Pair("norm-small", f"norm of {n_small} DTensors of 1,024", "torch", OURS, 1.0)
    gpt2 = Pair("norm-gpt2", f"norm of {n_gpt2} DTensors as in GPT-2", "torch", OURS, 1.0)
    steps = [
        Pair("ddp-torch", "DDP step against torch's clip", "torch", OURS),
        Pair("ddp-unclipped", "DDP step against none clipped", "unclipped", OURS),
        Pair("ddp-hook", "the same with the attribution hook", "unclipped", "hook"),
    ]
    return [
        ([small], partial(norms, size.small, ranks)),
        ([gpt2], partial(norms, size.gpt2, ranks)),
        (steps, partial(training, size.gpt)),
    ]


def measured(pair: Pair, seconds: dict[str, list[float]], sent: dict[str, Traffic]) -> Any:
    ratio = spread(paired_ratios(seconds[pair.ours], seconds[pair.baseline]))
    met = None if pair.at_least is None else ratio.median >= pair.at_least
    return {
        "name": pair.name,
        "title": pair.title,
        "ranks": dist.get_world_size(),
        "met": met,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "at_least": pair.at_least,
        "rounds": len(seconds[pair.ours]),
        "baseline": pair.baseline,
        "baseline_ms": statistics.median(seconds[pair.baseline]) * 1e3,
        "fastclip_ms": statistics.median(seconds[pair.ours]) * 1e3,
        "baseline_collectives": sent[pair.baseline].collectives,
        "baseline_bytes": sent[pair.baseline].n_bytes,
        "fastclip_collectives": sent[pair.ours].collectives,
        "fastclip_bytes": sent[pair.ours].n_bytes,
    }


def rank_main(rank: int, ranks: int, folder: str, size: Size) -> None:
    """One process; the first writes down what was measured."""
    torch.set_num_threads(1)
    meeting = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    rows = []
    for pairs, build in contests(size, ranks):
        sides = build()
        interleave(sides, rounds=4)  # DDP makes its buckets anew after the first
        sent = {}
        for side in sides:
            if side.before is not None:
                side.before()
            sent[side.name] = traffic(side.run)
        seconds = interleave(sides, size.rounds)
        rows += [measured(pair, seconds, sent) for pair in pairs]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()


def run(ranks: int, size: Size) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(ranks, folder, size), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows


HEADER = (
    f"{'workload':<38}{'ranks':>6}{'ratio':>7}  {'20-80 %':<12}{'baseline':>11}{'fastclip':>11}"
    "   collectives and bytes a rank sends"
)


def line(row: dict[str, Any]) -> str:
    percentiles = f"{row['ratio_low']:.2f} - {row['ratio_high']:.2f}"
    sent = (
        f"{row['baseline_collectives']}, {row['baseline_bytes']:,}; "
        f"{row['fastclip_collectives']}, {row['fastclip_bytes']:,}"
    )
    return (
        f"{row['title']:<38}{row['ranks']:>6}{row['ratio']:>7.2f}  {percentiles:<12}"
        f"{row['baseline_ms']:>8.2f} ms{row['fastclip_ms']:>8.2f} ms   {sent}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description="What clipping costs under torch.distributed, by gloo on this machine.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write one row a workload")
    parser.add_argument("--check", action="store_true", help="exit 1 if a row misses its target")
    args = parser.parse_args(arguments)
    if args.check and args.quick:
        parser.error("--check judges the full sizes; --quick shrinks them")
    if min(args.ranks) < 1:
        parser.error(f"--ranks must be at least 1, got {min(args.ranks)}")
    if args.csv is not None and not args.csv.absolute().parent.is_dir():
        parser.error(f"the folder of --csv {args.csv} does not exist")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # of the ranks' profilers, which would say hello
    torch.set_num_threads(1)
    backend = fastclip.backends.choose(torch.device("cpu")).name  # built here, once for all ranks
    here, others = machine.describe(), machine.Others()
    print(f"{here.cpu}, {here.cores} cores, torch {here.torch}, commit {here.commit}")
    print(f"backend {backend}, gloo, one thread a rank\n\n{HEADER}", flush=True)
    rows = []
    for ranks in args.ranks:
        rows += run(ranks, QUICK if args.quick else FULL)
        print(*(line(row) for row in rows if row["ranks"] == ranks), sep="\n", flush=True)
    busy = others.busy_cores()
    if busy is not None and busy > machine.BUSY_CORES:
        print(f"warning: other programs kept {busy:.2f} cores busy", file=sys.stderr)
    if args.csv is not None:
        _write(args.csv, rows, {**asdict(here), "backend": backend, "busy_cores": busy})
    return int(args.check and any(row["met"] is False for row in rows))


def _write(path: Path, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _digits(value) for key, value in {**row, **about}.items()})


def _digits(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
