"""Every backend at every SIMD level, the ones that cannot run here included, with the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fastclip import backends
from fastclip.backends import Backend
from fastclip.testing.cases import NORM_TYPES

# The norm types with SIMD code; the others take one path at every level, so one level tries them.
SIMD_NORM_TYPES = (0.0, 1.0, 2.0, float("inf"))
SIMD_LEVELS = ("avx512", "avx2", "plain")


@dataclass(frozen=True)
class Variant:
    """One backend, at one SIMD level where it has several."""

    id: str
    backend: str
    device: str
    simd: str | None = None
    unavailable: str | None = None  # why it cannot run here
    norm_types: tuple[float, ...] = NORM_TYPES

    @contextmanager
    def open(self) -> Iterator[Backend]:
        """The backend, running at this level until the block ends."""
        if self.simd is None:
            yield backends.get(self.backend)
            return
        from fastclip.backends import native

        before = native.simd()
        native.simd(self.simd)
        try:
            yield backends.get(self.backend)
        finally:
            native.simd(before)


def _device(name: str) -> str:
    """The type of device on which an available backend is tried."""
    types = backends.get(name).device_types
    return "cpu" if types is None or "cpu" in types else min(types)


def _simd_reason(level: str) -> str | None:
    """Why this processor cannot run a level."""
    from fastclip.backends import native

    before = native.simd()
    try:
        native.simd(level)
    except ValueError as error:
        return str(error)
    native.simd(before)
    return None


def variants() -> list[Variant]:
    """All of them, in the order of fastclip.backends.available()."""
    found = []
    for name, reason in backends.available().items():
        if name == "cpu":
            for level in SIMD_LEVELS:
                why = reason or _simd_reason(level)
                norms = NORM_TYPES if level == "plain" else SIMD_NORM_TYPES
                found.append(Variant(f"cpu-{level}", name, "cpu", level, why, norms))
        else:
            device = "none" if reason else _device(name)
            found.append(Variant(name, name, device, None, reason))
    if torch.cuda.is_available():
        found.append(Variant("reference-cuda", "reference", "cuda"))
    return found
