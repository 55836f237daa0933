"""What the kernels compile to, for GPUs that are not here: nothing of this runs on one."""

import re

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from fastclip.backends import triton as backend
from tests.triton_backend.compiled import (
    CUDA,
    DTYPES,
    HIP,
    KERNELS,
    REGISTERS_PER_SM,
    THREADS_PER_SM,
    basic_blocks,
    compiled,
    memory,
    usage,
)

WIDE = {"fp64": "v2.b64"}  # the others: v4.b32
THREADS = 256

pytestmark = [pytest.mark.slow, pytest.mark.skipif(backend.interpreted(), reason="interpreted")]

on_cuda = pytest.mark.parametrize("arch", CUDA)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@on_cuda
@every_dtype
@every_kernel
def test_loops_move_16_bytes_at_a_time(kernel: str, dtype: str, arch: int) -> None:
    wide = WIDE.get(dtype, "v4.b32")
    blocks = basic_blocks(compiled(kernel, dtype, arch).asm["ptx"])
    kinds = {"measure_kernel": ["ld.global"], "scale_kernel": ["ld.global", "st.global"]}
    for kind in kinds.get(kernel, ["ld.global", "st.global"]):
        hot = [block for block in blocks if wide in memory(block, kind)]
        assert hot, f"no {kind}.{wide}"
        for block in hot:
            assert memory(block, kind) == 4 * [wide]
            assert not memory(block, "ld.local")


@on_cuda
@every_dtype
@every_kernel
def test_registers_stack_and_local_memory(kernel: str, dtype: str, arch: int) -> None:
    result = compiled(kernel, dtype, arch)
    assert not re.search(r"\b(ld|st)\.local", result.asm["ptx"])
    used = usage(result)
    assert used.stack == 0
    if kernel == "clip_kernel":
        resident = backend.COOPERATIVE_BLOCKS_PER_SM * THREADS
    else:
        resident = THREADS_PER_SM[arch] // 2  # half of what an SM takes
        assert used.registers <= {2048: 64, 1536: 80}[THREADS_PER_SM[arch]]
    assert used.registers * resident <= REGISTERS_PER_SM


@pytest.mark.parametrize("order", [0, 1, 3])
@every_dtype
def test_other_norm_orders(dtype: str, order: int) -> None:
    for last in (True, False):
        used = usage(compiled("measure_kernel", dtype, 90, order, last))
        assert used.stack == 0
        assert used.registers <= 64


@on_cuda
@every_dtype
def test_denormals_are_not_flushed(dtype: str, arch: int) -> None:
    for kernel in KERNELS:
        assert not re.search(r"\.ftz\b", compiled(kernel, dtype, arch).asm["ptx"])


@on_cuda
def test_blocks_are_ordered_by_release_and_acquire(arch: int) -> None:
    measure = compiled("measure_kernel", "fp32", arch).asm["ptx"]
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add\.u32", measure)) == 2
    clip = compiled("clip_kernel", "fp32", arch).asm["ptx"]
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add\.u32", clip)) == 2
    assert re.search(r"(atom|red)\.global\.gpu\.release\.add\.u32", clip)
    assert re.search(r"(atom|ld)\.global\.gpu\.acquire\.", clip)
    for ptx in (measure, clip):  # no sum is an atomic
        assert not re.search(r"\b(atom|red)\.\S*\.f(16|32|64)", ptx)


@every_dtype
@every_kernel
def test_amd(kernel: str, dtype: str) -> None:
    code = compiled(kernel, dtype, HIP).asm["amdgcn"]
    assert re.search(r"global_load_dwordx4|buffer_load_dwordx4", code)
    assert re.search(r"\.private_segment_fixed_size: *0\b", code)
    assert not re.search(r"scratch_(load|store)", code)
