"""What the backends with kernels share: how a library is found, and what it does not serve.

The kernels serve a list whole or refuse it. What they refuse (complex numbers, memory too oddly
strided) and what they do not know (norm orders other than 0, 1, 2 and inf) goes to the reference,
tensor by tensor.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastclip._build import BuildError
from fastclip.backends import reference
from fastclip.backends.contract import Backend, Clipped, Unavailable, clip_in_passes

NORMS = (0.0, 1.0, 2.0, math.inf)

APART = "the gradients lie on more than one device"  # which no caller lets happen

QuickMeasure = Callable[[Sequence[Tensor], float, Tensor | None], Tensor | None]
QuickScale = Callable[[Sequence[Tensor], Tensor], bool]


class Operators(Protocol):
    """Of a native library. `refused`: the position of the first tensor that its kernels do not
    serve, and then nothing has been touched; else -1. `written`: whether they may have written."""

    def measure(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None
    ) -> tuple[Tensor, int]:
        """Table, refused."""

    def scale_(self, grads: Sequence[Tensor], coef: Tensor) -> tuple[int, bool]:
        """Refused, written."""

    def clip_(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float,
        limit: Tensor | None,
        inv_scale: Tensor | None,
        skip: bool,
    ) -> tuple[Tensor, Tensor, Tensor, int, bool]:
        """Table, total norm, coefficient, refused, written; `limit` goes before `max_norm`."""

    def served(self, grads: Sequence[Tensor]) -> list[bool]:
        """For each tensor; those that are can be served as one list."""


class ListBackend:
    """The functions of `contract.Backend`, from a native library's operators."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def backend(self, name: str, device_types: frozenset[str], about: str) -> Backend:
        return Backend(
            name,
            device_types,
            f"{about}; complex gradients and norm orders other than 0, 1, 2 and inf go to the "
            "reference",
            self.measure,
            self.scale_,
            self.clip_,
            self.quick_measure,
            self.quick_scale_,
            self.quick_clip_,
        )

    def measure(self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
        table = self.quick_measure(grads, p, inv_scale)
        if table is None:
            mine = self._served(grads) if p in NORMS else []
            table = measure_apart(self.quick_measure, grads, mine, p, inv_scale)
        return table

    def scale_(self, grads: Sequence[Tensor], coef: Tensor) -> None:
        if not self.quick_scale_(grads, coef):
            scale_apart_(self.quick_scale_, grads, self._served(grads), coef)

    def clip_(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float | Tensor,
        inv_scale: Tensor | None,
        skip: bool = False,
    ) -> Clipped:
        result = self.quick_clip_(grads, p, max_norm, inv_scale, skip)
        if result is not None:
            return result
        return clip_in_passes(self.measure, self.scale_, grads, p, max_norm, inv_scale, skip)

    def quick_measure(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None = None
    ) -> Tensor | None:
        if p not in NORMS or not grads:
            return None
        table, refused = self._operators.measure(grads, p, inv_scale)
        return table if refused < 0 else None

    def quick_scale_(self, grads: Sequence[Tensor], coef: Tensor) -> bool:
        if not grads:
            return True
        refused, written = self._operators.scale_(grads, coef)
        if written:
            note_written(grads)
        return refused < 0

    def quick_clip_(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float | Tensor,
        inv_scale: Tensor | None = None,
        skip: bool = False,
    ) -> Clipped | None:
        if p not in NORMS or not grads:
            return None
        number, limit = (math.inf, max_norm) if isinstance(max_norm, Tensor) else (max_norm, None)
        table, total, coef, refused, written = self._operators.clip_(
            grads, p, number, limit, inv_scale, skip
        )
        if refused >= 0:
            return None
        if written:
            note_written(grads)
        return table, total, coef

    def _served(self, grads: Sequence[Tensor]) -> list[int]:
        return [row for row, served in enumerate(self._operators.served(grads)) if served]


def load_library(ahead: Path, unfit: str | None, at_first_use: Callable[[], Path]) -> str:
    """Load the library built ahead if there is one and it fits, else the one built at first use.

    Returns how it came to be and where it is. Raises `Unavailable` with the reason.
    """
    path, origin = ahead, "built ahead"
    if unfit or not ahead.is_file():
        try:
            path, origin = at_first_use(), "built at first use"
        except (BuildError, OSError) as error:
            raise Unavailable(f"{ahead} {unfit}, and {error}" if unfit else str(error)) from error
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Unavailable(f"{path} could not be loaded: {error}") from error
    return f"{origin}, {path}"


def measure_apart(
    kernels: QuickMeasure,
    grads: Sequence[Tensor],
    served: Sequence[int],
    p: float,
    inv_scale: Tensor | None,
) -> Tensor:
    """The table of a list of which `kernels` serve the rows `served`, the reference the others."""
    if not served:
        return reference.measure(grads, p, inv_scale)
    table = kernels([grads[row] for row in served], p, inv_scale)
    if table is None:
        raise RuntimeError(APART)
    lines = dict(zip(served, table.unbind(), strict=True))
    if others := _others(grads, served):
        table = reference.measure([grads[row] for row in others], p, inv_scale)
        lines |= zip(others, table.unbind(), strict=True)
    # Not by an index, which would have to be sent to the device.
    return torch.stack([lines[row] for row in range(len(grads))])


def scale_apart_(
    kernels: QuickScale, grads: Sequence[Tensor], served: Sequence[int], coef: Tensor
) -> None:
    """Multiply a list of which `kernels` serve the rows `served`, the reference the others."""
    coefs = coef.expand(len(grads)).unbind()

    def part(rows: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        return [grads[row] for row in rows], torch.stack([coefs[row] for row in rows])

    if served and not kernels(*part(served)):
        raise RuntimeError(APART)
    if others := _others(grads, served):
        reference.scale_(*part(others))


def _others(grads: Sequence[Tensor], rows: Sequence[int]) -> list[int]:
    return sorted(set(range(len(grads))) - set(rows))


def note_written(grads: Sequence[Tensor]) -> None:
    """Tell autograd, which else would use a changed gradient in a gradient of gradients."""
    torch.autograd.graph.increment_version(grads)
