"""Compile the kernels for GPUs that are not here, and read what came out. Needs no driver."""

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastclip.backends import triton as backend
from fastclip.backends import triton_kernels

CUDA = (80, 90, 100, 120)
HIP = "gfx942"
DTYPES = ("fp32", "bf16", "fp16", "fp64")
KERNELS = ("measure_kernel", "scale_kernel", "clip_kernel")
THREADS_PER_SM = {80: 2048, 90: 2048, 100: 2048, 120: 1536}
REGISTERS_PER_SM = 65536

INT64 = ("addresses_ptr", "entries_ptr", "layouts_ptr", "blocks_ptr", "empties_ptr")
OPTIONAL = ("max_norm_ptr", "inv_scale_ptr")


@dataclass(frozen=True)
class Usage:
    """Of the cubin, per thread; as cuobjdump says."""

    registers: int
    stack: int


def _type(name: str) -> str:
    if name in triton_kernels.VALUES:
        return "i64"
    kinds = {"counters_ptr": "*i32", "total_ptr": "*fp32", **dict.fromkeys(INT64, "*i64")}
    return kinds.get(name, "*fp64")


@functools.cache
def compiled(kernel: str, dtype: str, arch: int | str, order: int = 2, last: bool = True) -> Any:
    """One kernel, with the options that the backend gives it."""
    function = getattr(triton_kernels, kernel)
    choices = {"ORDER": order, "DTYPE": tl.dtype(dtype), "LAST": last, "PER_ROW": False}
    names = [parameter.name for parameter in function.params]
    fixed = {name: value for name, value in choices.items() if name in names}
    fixed |= {name: None for name in OPTIONAL if name in names}
    signature = {name: "constexpr" if name in fixed else _type(name) for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed)
    options: dict[str, object] = {"num_stages": 1, "enable_fp_fusion": True}
    if arch == HIP:
        # Some Tritons link with ROCm's linker, which no wheel brings: what it would make is not
        # looked at, and no linking is as good.
        os.environ.setdefault("TRITON_HIP_LLD_PATH", "/bin/true")
        target = GPUTarget("hip", arch, 64)
        return triton.compile(source, target=target, options={**options, "num_warps": 4})
    cooperative = kernel == "clip_kernel"
    assert isinstance(arch, int)
    options |= {"num_warps": 8, "maxnreg": backend.max_registers(arch, cooperative)}
    if cooperative:
        options["launch_cooperative_grid"] = True
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def usage(result: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return Usage(int(found[1]), int(found[2]))


def basic_blocks(ptx: str) -> list[list[str]]:
    """The instructions between labels and branches."""
    blocks: list[list[str]] = [[]]
    for line in (line.strip() for line in ptx.splitlines()):
        if re.match(r"\$L__BB\w+:", line):
            blocks.append([])
        elif line and not line.startswith(("//", ".")):
            blocks[-1].append(line)
            if re.search(r"\bbra\b", line):
                blocks.append([])
    return blocks


def memory(block: list[str], kind: str) -> list[str]:
    """The widths of a block's loads ("ld.global") or stores: "v4.b32", "b16", ..."""
    found = (re.search(rf"\b{re.escape(kind)}((?:\.\w+)*)", line) for line in block)
    return [re.sub(r"^\.", "", match[1]) for match in found if match]
