"""The backend ``cuda``: the kernels in csrc/cuda, built ahead or at first use.

The library depends neither on torch's CUDA part nor on a shared cudart, and is told the stream.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastclip import _build, _build_cuda
from fastclip._build_cuda import Capability
from fastclip.backends.contract import Backend, Unavailable
from fastclip.backends.lists import ListBackend, load_library

LIBRARY = Path(__file__).resolve().parent.parent / "_C_cuda.abi3.so"


def provide() -> Backend:
    if torch.version.hip:
        raise Unavailable("this torch is built for ROCm, and these kernels are for NVIDIA GPUs")
    if not torch.cuda.is_available():
        raise Unavailable(f"{built_ahead()}, and torch finds no CUDA device here")
    about = description()
    library = torch.ops.fastclip_cuda
    without = _without_code(library.source_hash())
    kernels = ListBackend(Operators(library, without))
    first = next(i for i in range(torch.cuda.device_count()) if i not in without)
    try:
        kernels.measure([torch.zeros(1, device=f"cuda:{first}")], 2.0, None)
    except torch.OutOfMemoryError:  # may pass: not to be remembered as a reason
        raise
    except RuntimeError as error:  # a driver that is too old for the library's cudart, say
        raise Unavailable(f"{about}, but they do not start: {error}") from error
    return kernels.backend("cuda", frozenset({"cuda"}), "; ".join([about, *without.values()]))


def description() -> str:
    return f"CUDA kernels, {_loaded()}"


def built_ahead() -> str:
    """Whether the library is, and for what; found without loading it."""
    if not LIBRARY.is_file():
        return "not built ahead"
    csrc = _build.source_dir()
    try:
        archs = csrc and _build_cuda.built_for(LIBRARY, csrc)
    except OSError as error:
        return f"built ahead, but it cannot be read ({error.strerror}), {LIBRARY}"
    if not archs:
        return f"built ahead from other sources, {LIBRARY}"
    return f"built ahead for compute capability {_build_cuda.render(archs)}, {LIBRARY}"


class Operators:
    """Those of a library, for `lists.ListBackend`, on the current stream.

    without_code: per index of a device that the library is not for, the words that say so.
    """

    def __init__(self, library: Any, without_code: Mapping[int, str] | None = None) -> None:
        self._without_code = without_code or {}
        self._measure, self._scale_ = library.measure.default, library.scale_.default
        self._clip_, self._served = library.clip_.default, library.served.default

    def measure(
        self, grads: Sequence[Tensor], p: float, inv_scale: Tensor | None
    ) -> tuple[Tensor, int]:
        return self._measure(grads, p, _number(inv_scale, grads[0]), self._stream(grads[0]))

    def scale_(self, grads: Sequence[Tensor], coef: Tensor) -> tuple[int, bool]:
        coef = coef.detach().to(grads[0].device, torch.float64).resolve_neg().contiguous()
        refused = self._scale_(grads, coef, self._stream(grads[0]))
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
        *results, refused = self._clip_(grads, p, max_norm, *numbers, skip, self._stream(first))
        measures_only = limit is None and max_norm == torch.inf and inv_scale is None
        return *results, refused, refused < 0 and not measures_only

    def served(self, grads: Sequence[Tensor]) -> list[bool]:
        return self._served(grads).tolist()

    def _stream(self, grad: Tensor) -> int:
        if not grad.is_cuda:
            return 0
        if grad.device.index in self._without_code:
            raise RuntimeError(
                f"the backend 'cuda' cannot serve gradients on {grad.device}: "
                f"{self._without_code[grad.device.index]}"
            )
        # torch.cuda.current_stream would make an object for it.
        return torch._C._cuda_getCurrentRawStream(grad.device.index)


def _number(value: Tensor | None, grad: Tensor) -> Tensor | None:
    """As the operators take one: float64, on the CPU or on the gradients' device."""
    if value is None:
        return None
    device = value.device if value.device.type == "cpu" else grad.device
    return value.detach().to(device, torch.float64).resolve_neg()


@functools.cache
def _loaded() -> str:
    """Where the library is and how it came to be; loaded by the first call."""
    devices = set(_capabilities())
    return load_library(LIBRARY, _unfit(devices), lambda: _built_at_first_use(devices))


def _capabilities() -> list[Capability]:
    """Of every device, by index."""
    try:
        return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # in a forked process, or all devices are in exclusive use
        raise Unavailable(f"{built_ahead()}, and CUDA does not start: {error}") from error


def _without_code(stamp: str) -> dict[int, str]:
    archs = _build_cuda.parse(stamp.partition(" for ")[2])
    return {
        index: f"the library is built for compute capability {_build_cuda.render(archs)}, "
        f"and cuda:{index} has {major}.{minor}"
        for index, (major, minor) in enumerate(_capabilities())
        if not any(arch.runs_on((major, minor)) for arch in archs)
    }


def _unfit(devices: set[Capability]) -> str | None:
    """Why the library built ahead serves no device here, or None if it serves one or is not."""
    csrc = _build.source_dir()
    if not LIBRARY.is_file() or csrc is None:
        return None
    try:
        archs = _build_cuda.built_for(LIBRARY, csrc)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if archs is None:
        return "was built from other sources"
    if any(arch.runs_on(device) for arch in archs for device in devices):
        return None
    own = ", ".join(f"{major}.{minor}" for major, minor in sorted(devices))
    return f"was built for {_build_cuda.render(archs)} and not for the device's {own}"


def _built_at_first_use(devices: set[Capability]) -> Path:
    torch_dir = Path(torch.__file__).resolve().parent
    return _build_cuda.cached_library(torch.__version__, torch_dir, _build_cuda.local(devices))
