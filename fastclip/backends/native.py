"""The backend ``cpu``: the C++ kernels in csrc, built ahead or at first use.

The operators serve a list whole or refuse it and say at which tensor. What they refuse (complex
numbers, memory too oddly strided) and what they do not know (norm orders other than 0, 1, 2 and
inf) goes to the reference, tensor by tensor.
"""

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from fastclip import _build
from fastclip import table as tables
from fastclip.backends import reference
from fastclip.backends.contract import Backend, Clipped, Refused, Unavailable, clip_in_passes

NORMS = (0.0, 1.0, 2.0, math.inf)
LEVELS = ("avx512", "avx2", "plain")
LIBRARY = Path(__file__).resolve().parent.parent / "_C.abi3.so"


def load() -> None:
    """Load the library, building it first if need be. Raises `Unavailable` with the reason."""
    _operators()


def simd(level: str | None = None) -> str:
    """The SIMD level in use: ``"avx512"``, ``"avx2"`` or ``"plain"``; with `level`, change to it.

    Raises `ValueError` for a level that this CPU lacks.
    """
    used = str(_operators().simd(level or ""))
    if level is not None and used != level:
        raise ValueError(f"there is no SIMD level {level!r} here, only {', '.join(levels())}")
    return used


def levels() -> tuple[str, ...]:
    """The SIMD levels this CPU has, best first."""
    operators = _operators()
    used = operators.simd("")
    found = tuple(level for level in LEVELS if operators.simd(level) == level)
    operators.simd(used)
    return found


def description() -> str:
    return f"C++ kernels ({simd()}), {_operators().origin}"


def provide() -> Backend:
    load()
    return Backend(
        "cpu",
        frozenset({"cpu"}),
        f"{description()}; complex gradients and norm orders other than 0, 1, 2 and inf go to the "
        "reference",
        measure,
        scale_,
        clip_,
        quick_measure,
        quick_scale_,
        quick_clip_,
    )


def measure(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    """The table of `grads`; see `contract.Backend`."""
    table = quick_measure(grads, p, inv_scale)
    return _measure_apart(grads, p, inv_scale) if table is None else table


def scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply in place; see `contract.Backend`."""
    if quick_scale_(grads, coef):
        return
    coefs = coef.expand(len(grads))
    mine, rest = _served(grads)
    for backend_scale_, rows in ((quick_scale_, mine), (reference.scale_, rest)):
        backend_scale_([grads[row] for row in rows], coefs[rows])


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


def quick_measure(
    grads: Sequence[Tensor], p: float, inv_scale: Tensor | None = None
) -> Tensor | None:
    """The table, or None if some tensor is not served as it is; see `contract.Backend`."""
    if p not in NORMS:
        return None
    table, refused = _operators().measure(grads, p, _on_host(inv_scale))
    return table if refused < 0 else None


def quick_scale_(grads: Sequence[Tensor], coef: Tensor) -> bool:
    """Multiply in place; False, with nothing touched, if some tensor is not served as it is."""
    refused, written = _operators().scale_(grads, _on_host(coef))
    if written:
        _note_written(grads)
    return refused < 0


def quick_clip_(
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> Clipped | None:
    """Measure and rescale, or None with nothing touched; see `contract.Backend`."""
    if p not in NORMS:
        return None
    number, limit = (math.inf, max_norm) if isinstance(max_norm, Tensor) else (max_norm, None)
    table, total, coef, refused, written = _operators().clip_(
        grads, p, number, _on_host(limit), _on_host(inv_scale), skip
    )
    if refused >= 0:
        return None
    if written:
        _note_written(grads)
    return table, total, coef


def _on_host(values: Tensor | None) -> Tensor | None:
    """As the operators take numbers, which they read themselves."""
    if values is None:
        return None
    return values.detach().to("cpu", torch.float64).resolve_neg().contiguous()


def _note_written(grads: Sequence[Tensor]) -> None:
    """Tell autograd, which else would use a changed gradient in a gradient of gradients."""
    torch.autograd.graph.increment_version(grads)


def _measure_apart(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    """Rows from the kernels where they serve, else from the reference."""
    mine, rest = _served(grads) if p in NORMS else ([], list(range(len(grads))))
    table = tables.empty(p, len(grads), torch.device("cpu"))
    if mine:
        served = [grads[row] for row in mine]
        table[mine] = _operators().measure(served, p, _on_host(inv_scale))[0]
    if rest:
        table[rest] = reference.measure([grads[row] for row in rest], p, inv_scale)
    return table


def _served(grads: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    mask = _operators().served(grads).tolist()
    return (
        [row for row, served in enumerate(mask) if served],
        [row for row, served in enumerate(mask) if not served],
    )


@functools.cache
def _operators() -> SimpleNamespace:
    path, origin = _library()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Unavailable(f"{path} could not be loaded: {error}") from error
    native = torch.ops.fastclip_native
    names = ("measure", "scale_", "clip_", "served", "simd")
    operators = SimpleNamespace(
        origin=f"{origin}, {path}", **{name: getattr(native, name).default for name in names}
    )
    level = os.environ.get("FASTCLIP_SIMD")
    if level and operators.simd(level) != level:
        here = [name for name in LEVELS if operators.simd(name) == name]
        raise Refused(f"FASTCLIP_SIMD={level}: the SIMD levels here are {', '.join(here)}")
    return operators


def _library() -> tuple[Path, str]:
    """The library to load and how it came to be."""
    csrc = _build.source_dir()
    stale = ""
    if LIBRARY.is_file():
        if csrc is None or _build.is_current(LIBRARY, csrc):
            return LIBRARY, "built ahead"
        stale = f"{LIBRARY} was built from other sources, and "
    try:
        path = _build.cached_library(torch.__version__, Path(torch.__file__).resolve().parent)
    except _build.BuildError as error:
        raise Unavailable(f"{stale}{error}") from error
    return path, "built at first use"
