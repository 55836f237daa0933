"""Builds the CUDA library for CPU tensors, and drives the emulated device."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fastclip import _build, _build_cuda
from fastclip.backends import Backend
from fastclip.backends.cuda import Operators
from fastclip.backends.lists import ListBackend

ROOT = Path(__file__).resolve().parents[2]
NAME = "fastclip_cuda_emulated"
EMULATION = (
    *("-DFASTCLIP_CUDA_ON_CPU", "-include", str(ROOT / "tests" / "cuda_on_cpu.h")),
    *("-Wall", "-Wextra", "-Werror", "-Wno-sign-compare", "-Wno-unknown-pragmas", "-pthread"),
)

SMALL_ARGUMENTS_ALONE = ("-DCUDART_VERSION=12000",)  # a compiler before 12.1: half of the work


def build(target: Path, csrc: Path, flags: tuple[str, ...] = ("-O2",), name: str = NAME) -> None:
    """Compile csrc/cuda for the host into `target`, its operators in the namespace `name`."""
    torch_dir = Path(torch.__file__).resolve().parent
    compiler = _build.compiler_command()
    command = [*compiler, *_build.FLAGS, *EMULATION, f"-DFASTCLIP_CUDA_LIBRARY={name}", *flags]
    command += [*_build.host_flags(csrc, torch_dir, "emulated"), "-x", "c++"]
    link = [*compiler, "-shared", "-pthread", *flags, f"-L{torch_dir / 'lib'}"]
    _build.assemble(target, _build_cuda.sources(csrc), lambda _: command, link, ["-ltorch_cpu"])


class Device:
    """The emulated device: `tests/cuda_on_cpu_blocks.h` lists its controls and counters."""

    def __init__(self, library: Path, name: str = NAME) -> None:
        torch.ops.load_library(library)
        self._namespace = getattr(torch.ops, name)
        self.operators = Operators(self._namespace)
        self._library = ctypes.CDLL(str(library))
        self._library.cuda_on_cpu_get.restype = ctypes.c_longlong
        self._library.cuda_on_cpu_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]

    def backend(self) -> Backend:
        return ListBackend(self.operators).backend("cuda", frozenset({"cpu"}), "emulated")

    def get(self, name: str) -> int:
        return int(self._library.cuda_on_cpu_get(name.encode()))

    def set(self, name: str, value: int) -> None:
        self._library.cuda_on_cpu_set(name.encode(), value)

    def measure_on(self, stream: int, grads: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        table, refused = self._namespace.measure(grads, 2.0, None, stream)
        return table, int(refused)

    def last_error(self) -> int:
        """What cudaPeekAtLastError returns on this thread."""
        return int(self._library.cuda_on_cpu_last_error())

    @contextmanager
    def having(self, **controls: int) -> Iterator[None]:
        before = {name: self.get(name) for name in controls}
        try:
            for name, value in controls.items():
                self.set(name, value)
            yield
        finally:
            for name, value in before.items():
                self.set(name, value)

    def launches(self) -> int:
        """By the host's own account."""
        return int(self._namespace.launches())
