"""The backend ``triton``: a whole list of gradients in two launches, or one.

The kernels serve a list whole or not at all (`triton_plan.Plans.find`). What they do not take goes
to the reference, tensor by tensor: complex numbers, norm orders other than 0, 1, 2 and inf, more
dimensions than `triton_plan.MAX_DIMS` that do not merge.

Launches and bytes, derived from the code (G: bytes of the gradients). No GPU was at hand when this
was written: neither has been counted by a profiler, and nothing has been timed.

=======================================  =================  ==================  =================
call                                     launches           bytes of gradients  the least possible
=======================================  =================  ==================  =================
measure                                  1 a dtype          1 G                 1 G
scale                                    1 a dtype          2 G                 2 G
clip, not needed                         2 a dtype          1 G                 1 G
clip, needed                             2 a dtype          3 G                 3 G less what of the
                                                                                end L2 still holds
clip, one dtype, below half of L2        1 (cooperative)    1 G; needed: 2 G    the same
                                                            beside L2
loss scale taken out and clipped         2 a dtype          3 G                 3 G
torch 2.13, clip, needed or not          111 or 769 for an  3 G
                                         8 B model
torch 2.13, loss scale, then clip        more               5 G
=======================================  =================  ==================  =================

torch's launches are those of norm, cleanup and multiplication, from the limits in its source for
kernel arguments of 32 or 4 KB; about ten on scalars come on top.

The second launch of a clip that is not needed reads one number and returns; a `max_norm` that is
the float infinity needs none, without a loss scale. Beside the gradients a step sends 8 bytes for
each address if any has changed, and reads and writes 40 to 80 bytes for each gradient and each
block of the grid. A chunk (64 KiB) that is not finite, or whose float32 sum has left the range, is
read twice. Strided tensors are read element by element, in their logical order: correct, not fast.

CUDA graphs: call once outside before, as torch asks anyway (the kernels are compiled and loaded
then). A graph has tables of its own; the pinned memory it copies them from is kept for good.

Streams: the tables of a list belong to the stream it is clipped on. As with any operation of torch,
gradients written on another stream are for the caller to wait for.
"""

import functools
import importlib.metadata
import importlib.util
import math
import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.backends.contract import Backend, Clipped, Unavailable, clip_in_passes
from fastclip.backends.lists import measure_apart, scale_apart_
from fastclip.backends.triton_plan import Grid, Group, Plan, Plans, in_memory, served

OLDEST = (3, 4)
ORDERS = {0.0: 0, 1.0: 1, 2.0: 2, math.inf: 3}  # the kernels' numbers for them

N_WARPS = 8
BLOCKS_PER_SM = 4  # of 256 threads; with fewer, too few loads are on the way
COOPERATIVE_BLOCKS_PER_SM = 2  # every block must be resident, and this kernel takes more registers
COOPERATIVE_SHARE_OF_L2 = 0.5
INTERPRETED_BLOCKS = 4

Scalar = tuple[Tensor | None, int]

_plans = Plans()


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def provide() -> Backend:
    version = _version()
    if not interpreted() and not torch.cuda.is_available():
        raise Unavailable("torch finds no CUDA device here")
    types = {"cuda", "cpu"} if interpreted() else {"cuda"}
    return Backend(
        "triton",
        frozenset(types),
        f"Triton {version} kernels{', interpreted in Python' if interpreted() else ''}; complex "
        "gradients, layouts of more than 8 dimensions and norm orders other than 0, 1, 2 and inf "
        "go to the reference",
        measure,
        scale_,
        clip_,
        quick_measure,
        quick_scale_,
        quick_clip_,
    )


def measure(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    """The table of `grads`; see `contract.Backend`."""
    result = quick_measure(grads, p, inv_scale)
    if result is None:
        result = measure_apart(
            quick_measure, grads, _served(grads) if p in ORDERS else [], p, inv_scale
        )
    return result


def scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply in place; see `contract.Backend`."""
    if not quick_scale_(grads, coef):
        scale_apart_(quick_scale_, grads, _served(grads), coef)


@torch.no_grad()
def clip_(
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool = False,
) -> Clipped:
    """Measure, and rescale to `max_norm`; see `contract.Backend`."""
    result = quick_clip_(grads, p, max_norm, inv_scale, skip)
    if result is not None:
        return result
    return clip_in_passes(measure, scale_, grads, p, max_norm, inv_scale, skip)


def quick_scale_(grads: Sequence[Tensor], coef: Tensor) -> bool:
    """Multiply in place; False, with nothing touched, if some tensor is not served as it is."""
    if not grads:
        return True
    with _plans.lock, _on(grads[0]):
        plan = _plans.find(grads, _grid(grads[0].device))
        if plan is None:
            return False
        if coef.dim() > 0 and coef.numel() != len(grads):
            raise ValueError(f"coef has {coef.numel()} elements for {len(grads)} gradients")
        coef = in_memory(coef).to(plan.device, torch.float64).contiguous()
        _launch_scale(plan, coef, per_row=coef.dim() > 0)
    torch.autograd.graph.increment_version(grads)  # only the device knows whether it wrote
    return True


def launch(kernel: Any, blocks: int, *arguments: object, **options: object) -> None:
    """The one place that starts kernels."""
    kernel[(blocks,)](*arguments, **options)


def quick_measure(
    grads: Sequence[Tensor], p: float, inv_scale: Tensor | None = None
) -> Tensor | None:
    """The table, or None if some tensor is not served as it is; see `contract.Backend`."""
    if p not in ORDERS:
        return None
    if not grads:
        return tables.empty(p, 0, torch.device("cpu"))
    with _plans.lock, _on(grads[0]):
        plan = _plans.find(grads, _grid(grads[0].device))
        if plan is None:
            return None
        return _launch_measure(plan, p, math.inf, inv_scale, skip=False)[0]


def quick_clip_(
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> Clipped | None:
    """Measure and rescale, or None with nothing touched; see `contract.Backend`."""
    if p not in ORDERS or not grads:
        return None
    with _plans.lock, _on(grads[0]):
        plan = _plans.find(grads, _grid(grads[0].device))
        if plan is None:
            return None
        measures_only = (
            inv_scale is None and not isinstance(max_norm, Tensor) and max_norm == math.inf
        )
        if plan.cooperative:
            result = _launch_clip(plan, p, max_norm, inv_scale, skip)
        else:
            result = _launch_measure(plan, p, max_norm, inv_scale, skip)
            if not measures_only:
                _launch_scale(plan, plan.scratch.factor, per_row=False)
    if not measures_only:
        torch.autograd.graph.increment_version(grads)  # only the device knows whether it wrote
    return result


def _launch_measure(
    plan: Plan, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> Clipped:
    """Table, total norm and coefficient; the plan's factor is set as well."""
    results = _results(plan)
    arguments = _list_arguments(plan, results, max_norm, inv_scale, skip)
    for group in plan.groups:
        launch(
            _kernels().measure_kernel,
            group.blocks,
            *_group_arguments(plan, group),
            *arguments,
            ORDER=ORDERS[p],
            DTYPE=_triton_dtype(group.dtype),
            LAST=group is plan.groups[-1],
            **_options(plan.device),
        )
    return results


def _launch_scale(plan: Plan, factor: Tensor, per_row: bool) -> None:
    for group in reversed(plan.groups):  # the last one's end was read last
        launch(
            _kernels().scale_kernel,
            group.blocks,
            group.addresses,
            group.entries,
            plan.layouts,
            group.grid,
            factor,
            PER_ROW=per_row,
            DTYPE=_triton_dtype(group.dtype),
            **_options(plan.device),
        )


def _launch_clip(
    plan: Plan, p: float, max_norm: float | Tensor, inv_scale: Tensor | None, skip: bool
) -> Clipped:
    results = _results(plan)
    (group,) = plan.groups
    launch(
        _kernels().clip_kernel,
        group.blocks,
        *_group_arguments(plan, group),
        *_list_arguments(plan, results, max_norm, inv_scale, skip),
        ORDER=ORDERS[p],
        DTYPE=_triton_dtype(group.dtype),
        **_options(plan.device, cooperative=True),
    )
    return results


def _results(plan: Plan) -> Clipped:
    table = torch.empty(plan.n, tables.COLUMNS, dtype=torch.float64, device=plan.device)
    wide = torch.float64 if plan.wide else torch.float32
    total = torch.empty((), dtype=wide, device=plan.device)
    return table, total, torch.empty((), dtype=torch.float64, device=plan.device)


def _group_arguments(plan: Plan, group: Group) -> tuple[Tensor, ...]:
    tables_ = (group.addresses, group.entries, plan.layouts, group.grid)
    return (*tables_, plan.scratch.slots, plan.scratch.counters)


def _list_arguments(
    plan: Plan,
    results: Clipped,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool,
) -> tuple[object, ...]:
    table, total, coef = results
    return (
        *(plan.empties, plan.empties.numel(), table, plan.n, total, coef, plan.scratch.factor),
        *_scalar(max_norm, plan.device),
        *_scalar(1.0 if inv_scale is None else inv_scale, plan.device),
        int(skip),
    )


def _scalar(value: float | Tensor, device: torch.device) -> Scalar:
    """What the kernels take for a number: where it is on their device, or else its bits."""
    if isinstance(value, Tensor):
        value = in_memory(value)
        if value.device == device:
            return value, 0
        if value.device.type != "cpu":
            return value.to(device), 0
    return None, struct.unpack("<q", struct.pack("<d", float(value)))[0]


def max_registers(capability: int, cooperative: bool = False) -> int:
    """What a thread may have so that half of the threads of an SM fit (two blocks, if cooperative).

    There are 65,536 registers for 2,048 threads on 8.0, 9.0 and 10.x, for 1,536 on the others.
    """
    if cooperative:
        return 128
    return 64 if capability in (80, 90) or 100 <= capability < 120 else 80


@functools.cache
def _options(device: torch.device, cooperative: bool = False) -> dict[str, object]:
    if interpreted() or device.type != "cuda":
        return {}
    options: dict[str, object] = {"num_stages": 1, "enable_fp_fusion": True}
    if torch.version.hip:
        return {**options, "num_warps": N_WARPS // 2}  # of 64 threads
    major, minor = torch.cuda.get_device_capability(device)
    options |= {"num_warps": N_WARPS, "maxnreg": max_registers(10 * major + minor, cooperative)}
    return {**options, "launch_cooperative_grid": True} if cooperative else options


def _served(grads: Sequence[Tensor]) -> list[int]:
    """The rows that the kernels serve; of two at one address the first."""
    rows: list[int] = []
    seen: set[int] = set()
    for row, grad in enumerate(grads):
        if served(grad) and (grad.numel() == 0 or grad.data_ptr() not in seen):
            seen.add(grad.data_ptr())
            rows.append(row)
    return rows


def _on(grad: Tensor) -> AbstractContextManager[object]:
    """Make the gradient's device the current one, on which Triton launches."""
    if grad.device.type != "cuda" or grad.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(grad.device)


@functools.cache
def _grid(device: torch.device) -> Grid:
    if device.type != "cuda":
        return Grid(INTERPRETED_BLOCKS)
    properties = torch.cuda.get_device_properties(device)
    n = properties.multi_processor_count
    if not _has_cooperative_launch():
        return Grid(n * BLOCKS_PER_SM)
    share = int(properties.L2_cache_size * COOPERATIVE_SHARE_OF_L2)
    return Grid(n * BLOCKS_PER_SM, share, n * COOPERATIVE_BLOCKS_PER_SM)


def _has_cooperative_launch() -> bool:
    if interpreted() or torch.version.hip:
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return hasattr(CUDAOptions, "launch_cooperative_grid")


@functools.cache
def _kernels() -> ModuleType:
    from fastclip.backends import triton_kernels

    return triton_kernels


@functools.cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def _version() -> str:
    if importlib.util.find_spec("triton") is None:
        raise Unavailable("the package triton is not installed")
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise Unavailable(f"Triton {version} is older than {'.'.join(map(str, OLDEST))}")
    return version
