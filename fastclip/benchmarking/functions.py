"""The rows of the functions that replace those of torch.nn.utils."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

import fastclip
from fastclip.benchmarking import machine, peers
from fastclip.benchmarking.checks import require_right, require_statistics
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.workloads import (
    DTYPES,
    MIXED,
    WORKLOADS,
    Clip,
    clip,
    copies_beyond,
    dtypes,
    gradients,
    plain_statistics,
)

STATISTICS = ("norms", "max_abs", "nan_count", "inf_count", "zero_count")
CACHED = ("2000x1024", "2000x1", "20000x1")  # lists that the last-level cache can hold
BIG = ("gpt2-large", "gpt2-xl")  # 3 and 6 GB in float32
LONG = ("bert-large", "gpt2-medium", "llama3-8b/16", *BIG)  # more than 300 M elements
SHARE = 0.4  # of the time of a row: there are a hundred of these

TARGETS = {
    "gpt2-small-float32": 2.2,
    "gpt2-small-bfloat16": 2.6,
    "gpt2-small-float16": 6.0,
    "gpt2-small-float32-clipped": 1.05,
    "gpt2-small-bfloat16-clipped": 1.2,
    "gpt2-small-float16-clipped": 2.8,
    "2000x1024-float32-warm": 6.0,
    "2000x1-float32-warm": 5.0,
}


def problem(
    size: Size,
    workload: str,
    dtype: str,
    clips: bool = False,
    norm: float = 2.0,
    warm: bool = False,
) -> Clip:
    """A workload's list. One that fits the last-level cache comes in copies that do not, unless
    it is to be `warm`."""
    shapes = size.shapes(workload)
    each = dtypes(shapes, dtype)
    cache = machine.last_level_bytes() if size.cache_bytes is None else size.cache_bytes
    copies = 1 if warm else copies_beyond(cache, shapes, each)
    return clip(shapes, each, clips=clips, norm_type=norm, copies=copies)


def _clip(
    size: Size,
    workload: str,
    dtype: str,
    clips: bool = False,
    norm: float = 2.0,
    warm: bool = False,
) -> Contest:
    return peers.contest(problem(size, workload, dtype, clips, norm, warm), size)


def _statistics(size: Size, workload: str) -> Contest:
    task = problem(size, workload, "float32")
    right = plain_statistics(task.gradients)  # of every copy

    def side(name: str, call: Callable[[], dict[str, torch.Tensor]]) -> Side:
        return Side(name, call, task.restore, partial(require_statistics, name, right))

    sides = [
        side("plain loop", lambda: plain_statistics(task.gradients)),
        side(OURS, lambda: _our_statistics(task.parameters)),
    ]
    return Contest(sides, task.n_bytes, task.n_tensors)


def _our_statistics(parameters: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    stats = fastclip.grad_stats(parameters)
    return {name: getattr(stats, name) for name in STATISTICS}


def _read_rate(size: Size) -> Contest:
    task = problem(size, "gpt2-small", "float32")
    (big,) = gradients([(task.n_bytes // 4,)])
    call = partial(fastclip.clip_grad_norm_, task.parameters, task.max_norm)
    sides = [
        Side("sum", big.sum),
        Side(OURS, call, task.restore, partial(require_right, OURS, task)),
        Side("aminmax", big.aminmax),
    ]
    return Contest(sides, task.n_bytes, task.n_tensors)


def _clip_rows() -> Iterator[Row]:
    for workload in WORKLOADS:
        for dtype in DTYPES:
            if workload == "one" and dtype == MIXED:
                continue  # one tensor has one dtype
            for warm in (False, True) if workload in CACHED else (False,):
                for clips in (False, True):
                    yield _clip_row(workload, dtype, clips, warm)


def _clip_row(workload: str, dtype: str, clips: bool, warm: bool) -> Row:
    name = f"{workload}-{dtype}{'-clipped' if clips else ''}{'-warm' if warm else ''}"
    half = dtype in ("float16", MIXED)
    return Row(
        name,
        f"{workload}, {dtype}{', clipped' if clips else ''}{', warm' if warm else ''}",
        partial(_clip, workload=workload, dtype=dtype, clips=clips, warm=warm),
        TARGETS.get(name),
        reads=1,
        writes=int(clips),
        share=1.0 if name in TARGETS else SHARE,
        workload=workload,
        dtype=dtype,
        clips=clips,
        rivals=peers.NAMES,
        warm=warm,
        big=(workload in BIG and dtype != "bfloat16") or (workload in LONG and half),
    )


def _statistics_row(workload: str, at_least: float | None) -> Row:
    return Row(
        f"statistics-{workload}",
        f"five statistics, {workload}",
        partial(_statistics, workload=workload),
        at_least,
        reads=1,
        workload=workload,
        dtype="float32",
        rivals=("plain loop",),
    )


def _rows() -> Iterator[Row]:
    yield from _clip_rows()
    yield Row(
        "gpt2-small-float32-inf",
        "gpt2-small, float32, inf norm",
        partial(_clip, workload="gpt2-small", dtype="float32", norm=math.inf),
        at_least=8.0,
        reads=1,
        workload="gpt2-small",
        dtype="float32",
        clips=False,
        rivals=peers.NAMES,
    )
    yield _statistics_row("gpt2-small", 20.0)
    yield _statistics_row("2000x1024", None)
    yield Row(
        "read-rate",
        "read rate to best of sum, aminmax",
        _read_rate,
        at_least=0.85,
        limit=1.0,
        rivals=("sum", "aminmax"),
    )


ROWS = list(_rows())
