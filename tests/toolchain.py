"""An nvcc and a host compiler that only write down what they are asked for."""

from pathlib import Path

import pytest

from fastclip import _build, _build_cuda

KNOWN = "75 80 86 89 90 100 120"

# Options that only ask are answered. An object's content is the command that made it, a library's
# is that of its objects.
HOST = """
if [ "$1" = --version ]; then echo "host {version}"; exit; fi
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
grep -- "-o $2" {log} > "$2"
"""
NVCC = """
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88"; exit;;
--list-gpu-arch) for n in {known}; do echo "compute_$n"; done; exit;;
esac
echo "nvcc $@" >> {log}
linked=$(echo "$@" | grep -e -shared)
while [ "$1" != -o ]; do shift; done
if [ "$linked" ]; then
  out="$2"; shift 2
  for word in "$@"; do if [ -f "$word" ]; then cat "$word"; fi; done > "$out"
else grep -- "-o $2" {log} > "$2"; fi
"""


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Tools:
    """An nvcc and a host compiler of given versions, and a csrc of three files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder, folder / "log"
        self.csrc = folder / "csrc"
        self.home = folder / "cuda"
        (self.home / "bin").mkdir(parents=True)
        for name in ("table.h", "ops.cpp", "cpu/kernels.cpp", "cuda/ops.cpp", "cuda/kernels.cu"):
            (self.csrc / name).parent.mkdir(parents=True, exist_ok=True)
            (self.csrc / name).write_text("")
        monkeypatch.setattr(_build, "source_dir", lambda: self.csrc)
        monkeypatch.setenv("FASTCLIP_CACHE", str(folder / "cache"))
        monkeypatch.setenv("CUDA_HOME", str(self.home))
        monkeypatch.setenv("CXX", str(folder / "host"))
        monkeypatch.delenv("MAX_JOBS", raising=False)
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        self.nvcc()
        self.host()

    def nvcc(self, version: str = "12.9", known: str = KNOWN) -> None:
        _build_cuda._asked.cache_clear()
        script(
            self.home / "bin" / "nvcc",
            NVCC.format(version=version, known=known, log=self.log),
        )

    def host(self, version: str = "1") -> None:
        script(self.folder / "host", HOST.format(version=version, log=self.log))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()
