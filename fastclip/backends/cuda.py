"""The backend ``cuda``: the kernels in csrc/cuda, built ahead or at first use.

The library depends neither on torch's CUDA part nor on a shared cudart, and is told the stream.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastclip import _build, _build_cuda
from fastclip.backends.contract import Backend, Unavailable
from fastclip.backends.lists import ListBackend, load_library

LIBRARY = Path(__file__).resolve().parent.parent / "_C_cuda.abi3.so"


def provide() -> Backend:
    if torch.version.hip:
        raise Unavailable("this torch is built for ROCm, and these kernels are for NVIDIA GPUs")
    if not torch.cuda.is_available():
        raise Unavailable(f"{built_ahead()}, and torch finds no CUDA device here")
    about = description()
    kernels = ListBackend(Operators(torch.ops.fastclip_cuda))
    try:
        kernels.measure([torch.zeros(1, device="cuda")], 2.0, None)
    except RuntimeError as error:  # a driver that is too old for the library's cudart, say
        raise Unavailable(f"{about}, but they do not start: {error}") from error
    return kernels.backend("cuda", frozenset({"cuda"}), about)


def description() -> str:
    return f"CUDA kernels, {_loaded()}"


def built_ahead() -> str:
    """Whether the library is, and for what; found without loading it."""
    if not LIBRARY.is_file():
        return "not built ahead"
    csrc = _build.source_dir()
    archs = csrc and _build_cuda.built_for(LIBRARY, csrc)
    if not archs:
        return f"built ahead from other sources, {LIBRARY}"
    return f"built ahead for compute capability {_build_cuda.render(archs)}, {LIBRARY}"


class Operators:
    """Those of a library, for `lists.ListBackend`, on the current stream."""

    def __init__(self, library: Any) -> None:
        self._measure, self._scale_ = library.measure.default, library.scale_.default
        self._clip_, self._served = library.clip_.default, library.served.default

    def measure(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None
    ) -> tuple[Tensor, int]:
        return self._measure(grads, p, _number(inv_scale, grads[0]), _stream(grads[0]))

    def scale_(self, grads: Sequence[Tensor], coef: Tensor) -> tuple[int, bool]:
        coef = coef.detach().to(grads[0].device, torch.float64).resolve_neg().contiguous()
        refused = self._scale_(grads, coef, _stream(grads[0]))
        return refused, refused < 0  # only the device knows whether it wrote

    def clip_(
        self,
        grads: Sequence[Tensor],
        p: float,
        max_norm: float,
        limit: Tensor | None,
        inv_scale: Tensor | None,
        skip: bool,
    ) -> tuple[Tensor, Tensor, Tensor, int, bool]:
        first = grads[0]
        numbers = (_number(limit, first), _number(inv_scale, first))
        *results, refused = self._clip_(grads, p, max_norm, *numbers, skip, _stream(first))
        measures_only = limit is None and max_norm == torch.inf and inv_scale is None
        return *results, refused, refused < 0 and not measures_only

    def served(self, grads: Sequence[Tensor]) -> list[bool]:
        return self._served(grads).tolist()


def _number(value: Tensor | None, grad: Tensor) -> Tensor | None:
    """As the operators take one: float64, on the CPU or on the gradients' device."""
    if value is None:
        return None
    device = value.device if value.device.type == "cpu" else grad.device
    return value.detach().to(device, torch.float64).resolve_neg()


def _stream(grad: Tensor) -> int:
    # torch.cuda.current_stream would make an object for it.
    return torch._C._cuda_getCurrentRawStream(grad.device.index) if grad.is_cuda else 0


@functools.cache
def _loaded() -> str:
    """Where the library is and how it came to be; loaded by the first call."""
    devices = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return load_library(LIBRARY, _unfit(devices), lambda: _built_at_first_use(devices))


def _unfit(devices: set[tuple[int, int]]) -> str | None:
    csrc = _build.source_dir()
    if not LIBRARY.is_file() or csrc is None:
        return None
    archs = _build_cuda.built_for(LIBRARY, csrc)
    if archs is None:
        return "was built from other sources"
    for device in sorted(devices):
        if not any(arch.runs_on(device) for arch in archs):
            own = ".".join(map(str, device))
            return f"was built for {_build_cuda.render(archs)} and not for the device's {own}"
    return None


def _built_at_first_use(devices: set[tuple[int, int]]) -> Path:
    torch_dir = Path(torch.__file__).resolve().parent
    return _build_cuda.cached_library(torch.__version__, torch_dir, _build_cuda.local(devices))
