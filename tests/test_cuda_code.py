"""What the CUDA kernels compile to, for GPUs that are not here: nothing of this runs on one."""

import functools
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from fastclip import _build, _build_cuda

ARCHS = (80, 90, 100, 120)
REGISTERS = {80: 64, 90: 64, 100: 64, 120: 80}  # half of the threads of a multiprocessor fit
COOPERATIVE_REGISTERS = 128  # two blocks of 256 threads fit, and all must be resident
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Two sizes of arguments; measure and clip are there for squares and for the other norms.
KERNELS = {"measure": 4, "clip": 4, "scale": 2, "store": 2}
WIDE = 4  # loads of 16 bytes that a loop has on the way at once

MISSING = _build_cuda.missing_nvcc()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no CUDA is compiled: {MISSING}"),
]
every_arch = pytest.mark.parametrize("arch", ARCHS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is built ahead, for every default architecture."""
    library = tmp_path_factory.mktemp("cuda") / "library.so"
    archs = _build_cuda.parse(_build_cuda.DEFAULT)
    _build_cuda.build(library, archs, torch_dir=Path(torch.__file__).resolve().parent)
    return library


@functools.cache
def cuobjdump(library: Path, *options: str) -> str:
    """From the toolkit or from the Triton wheel."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton", reason="neither cuobjdump nor Triton is installed")
        tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    done = subprocess.run([tool, *options, library], capture_output=True, text=True, check=True)
    return done.stdout


def kernel(symbol: str) -> str:
    found = re.search(r"(measure|scale|clip|store)_kernel(?!s)", symbol)
    assert found, symbol
    return found[1]


@functools.cache
def instructions(library: Path, arch: int) -> list[tuple[str, list[list[str]]]]:
    """Each function's instructions, parted at branches and at what is branched to."""
    text = cuobjdump(library, "-sass", "-arch", f"sm_{arch}")
    parts = re.split(r"Function : (\S+)", text)[1:]
    return [
        (kernel(symbol), basic_blocks(code))
        for symbol, code in zip(parts[::2], parts[1::2], strict=True)
    ]


def basic_blocks(code: str) -> list[list[str]]:
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\d+ +)?([A-Z][^;]*?) *;", code)
    targets = {found[1] for _, line in lines if (found := re.match(r"B\S+ .*?0x(\w+)$", line))}
    blocks: list[list[str]] = [[]]
    for address, line in lines:
        if address.lstrip("0") in targets:
            blocks.append([])
        blocks[-1].append(line)
        if re.match(r"BRA|BRX|EXIT|RET", line):
            blocks.append([])
    return blocks


def dtype(block: list[str]) -> str | None:
    """Of the elements that it does arithmetic on, from how they are made numbers: 64 bytes or so
    of them are 8 float64, 16 float32 or 32 halves, of which float16 are converted two at a time
    and bfloat16 by shifts and masks."""
    counts = Counter(line.split()[0].split(".")[0] for line in block)
    doubles, singles = (sum(counts[f"{kind}{op}"] for op in ("ADD", "FMA", "MUL")) for kind in "DF")
    if doubles >= 8:
        return "float64"
    if singles < 16:
        return None
    if counts["HADD2"] >= 16:
        return "float16"
    return "bfloat16" if counts["LOP3"] + counts["PRMT"] >= 16 else "float32"


def hot(blocks: list[list[str]], kind: str) -> dict[str, list[list[str]]]:
    """By dtype: the blocks with all their loads ("LDG") or stores ("STG") of a full chunk."""
    found: dict[str, list[list[str]]] = {name: [] for name in DTYPES}
    for block in blocks:
        name = dtype(block)
        if count(block, f"{kind}.E.128") == WIDE and name is not None:
            found[name].append(block)
    return found


def count(block: list[str], instruction: str) -> int:
    return sum(line.startswith(instruction) for line in block)


def test_every_default_architecture_is_there(library: Path) -> None:
    elf = re.findall(r"\.(sm_\w+)\.cubin", cuobjdump(library, "--list-elf"))
    ptx = re.findall(r"\.(sm_\w+)\.ptx", cuobjdump(library, "--list-ptx"))
    assert set(elf) == {f"sm_{arch}" for arch in ARCHS}
    assert set(ptx) == {"sm_120"}
    csrc = _build.existing_source_dir()
    assert _build_cuda.built_for(library, csrc) == _build_cuda.parse(_build_cuda.DEFAULT)


@every_arch
def test_registers_and_stack(library: Path, arch: int) -> None:
    said = cuobjdump(library, "-res-usage", "-arch", f"sm_{arch}")
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert Counter(kernel(symbol) for symbol, *_ in usage) == KERNELS
    for symbol, registers, stack, local in usage:
        cooperative = kernel(symbol) == "clip"
        ceiling = COOPERATIVE_REGISTERS if cooperative else REGISTERS[arch]
        assert int(registers) <= ceiling, symbol
        assert (stack, local) == ("0", "0"), symbol


@every_arch
def test_nothing_is_spilled_or_flushed(library: Path, arch: int) -> None:
    functions = instructions(library, arch)
    assert Counter(name for name, _ in functions) == KERNELS
    for name, blocks in functions:
        lines = [line for block in blocks for line in block]
        assert any(line.startswith("STG") for line in lines), name
        for line in lines:
            assert not re.match(r"(LDL|STL)\b", line), f"{name}: {line}"
            assert not re.match(r"[DFH](ADD|FMA|MUL)\S*\.FTZ", line), f"{name}: {line}"


@every_arch
def test_loops_move_16_bytes_at_a_time(library: Path, arch: int) -> None:
    functions = instructions(library, arch)
    assert Counter(name for name, _ in functions) == KERNELS
    for name, blocks in functions:
        reading = [block for block in blocks if count(block, "STG") == 0]
        if name in ("measure", "clip"):
            for element, loops in hot(reading, "LDG").items():
                assert loops, f"{name}: no loop reads {element}"
                assert all(count(loop, "LDG") == WIDE for loop in loops)
        if name in ("scale", "clip"):
            for element, loops in hot(blocks, "STG").items():
                assert loops, f"{name}: no loop writes {element}"
                for loop in loops:
                    assert count(loop, "LDG.E.128") == count(loop, "LDG") == WIDE
                    assert count(loop, "STG") == WIDE
