"""The backend ``cpu``: the C++ kernels in csrc/cpu, built ahead or at first use."""

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastclip import _build
from fastclip.backends.contract import Backend, Refused
from fastclip.backends.lists import NORMS, ListBackend, load_library, note_written

LEVELS = ("avx512", "avx2", "plain")
LIBRARY = Path(__file__).resolve().parent.parent / "_C.abi3.so"


def load() -> None:
    """Load the library, building it first if need be. Raises `Unavailable` with the reason."""
    _loaded()


def simd(level: str | None = None) -> str:
    """The SIMD level in use: ``"avx512"``, ``"avx2"`` or ``"plain"``; with `level`, change to it.

    Raises `ValueError` for a level that this CPU lacks.
    """
    used = _level(level or "")
    if level is not None and used != level:
        raise ValueError(f"there is no SIMD level {level!r} here, only {', '.join(levels())}")
    return used


def levels() -> tuple[str, ...]:
    """The SIMD levels this CPU has, best first."""
    used = _level("")
    found = tuple(level for level in LEVELS if _level(level) == level)
    _level(used)
    return found


def description() -> str:
    return f"C++ kernels ({simd()}), {_loaded()}"


def provide() -> Backend:
    load()
    operators = Operators()
    backend = ListBackend(operators).backend("cpu", frozenset({"cpu"}), description())
    return replace(
        backend,
        quick_measure_units=operators.measure_units,
        quick_unit_norms=operators.unit_norms,
        quick_scale_units_=operators.scale_units_,
    )


class Operators:
    """The library's, for `lists.ListBackend`; those for units are for `contract.Backend` itself."""

    def __init__(self) -> None:
        native = torch.ops.fastclip_native
        self._measure, self._scale_ = native.measure.default, native.scale_.default
        self._clip_, self._served = native.clip_.default, native.served.default
        self._measure_units = native.measure_units.default
        self._unit_norms = native.unit_norms.default
        self._scale_units_ = native.scale_units_.default

    def measure(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None
    ) -> tuple[Tensor, int]:
        return self._measure(grads, p, _on_host(inv_scale))

    def scale_(self, grads: Sequence[Tensor], coef: Tensor) -> tuple[int, bool]:
        return self._scale_(grads, _on_host(coef))

    def clip_(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float,
        limit: Tensor | None,
        inv_scale: Tensor | None,
        skip: bool,
    ) -> tuple[Tensor, Tensor, Tensor, int, bool]:
        return self._clip_(grads, p, max_norm, _on_host(limit), _on_host(inv_scale), skip)

    def measure_units(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if p not in NORMS or not grads:
            return None
        table, norms, refused = self._measure_units(grads, p, _on_host(inv_scale))
        return (table, norms) if refused < 0 else None

    def unit_norms(self, tensors: Sequence[Tensor]) -> Tensor | None:
        norms, refused = self._unit_norms(tensors)
        return norms if refused < 0 else None

    def scale_units_(self, grads: Sequence[Tensor], coef: Tensor) -> bool:
        refused, written = self._scale_units_(grads, _on_host(coef))
        if changed := [grads[row] for row in written.nonzero().view(-1).tolist()]:
            note_written(changed)
        return bool(refused < 0)

    def served(self, grads: Sequence[Tensor]) -> list[bool]:
        return self._served(grads).tolist()


def _on_host(values: Tensor | None) -> Tensor | None:
    """As the operators take numbers, which they read themselves."""
    if values is None:
        return None
    return values.detach().to("cpu", torch.float64).resolve_neg().contiguous()


def _level(asked: str) -> str:
    """The level in use, changed first to the one asked for if that is there; "" only asks."""
    _loaded()
    return str(torch.ops.fastclip_native.simd(asked))


@functools.cache
def _loaded() -> str:
    """Where the library is and how it came to be; loaded by the first call."""
    origin = load_library(LIBRARY, _unfit(), _built_at_first_use)
    simd = torch.ops.fastclip_native.simd
    level = os.environ.get("FASTCLIP_SIMD")
    if level and simd(level) != level:
        here = [name for name in LEVELS if simd(name) == name]
        raise Refused(f"FASTCLIP_SIMD={level}: the SIMD levels here are {', '.join(here)}")
    return origin


def _unfit() -> str | None:
    csrc = _build.source_dir()
    if not LIBRARY.is_file() or csrc is None:
        return None
    try:
        return None if _build.is_current(LIBRARY, csrc) else "was built from other sources"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _built_at_first_use() -> Path:
    return _build.cached_library(torch.__version__, Path(torch.__file__).resolve().parent)
