"""The C++ kernels and passes without torch: with each compiler, under sanitizers, on aarch64."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastclip import _build

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "tests" / "cpp" / "kernels_test.cpp"
X86 = platform.machine().lower() in ("x86_64", "amd64")

# Compiler, flags, and what runs the program; "thread" finds races between the workers of a pass.
VARIANTS = {
    "g++": ("g++", ["-O3"], []),
    "clang++": ("clang++", ["-O3"], []),
    "thread": ("g++", ["-O1", "-g", "-fsanitize=thread"], []),
    "address": (
        "g++",
        ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        [],
    ),
    "aarch64": ("aarch64-linux-gnu-g++", ["-O3", "-static"], ["qemu-aarch64-static"]),
}


def compile_driver(compiler: str, flags: list[str], folder: Path, own_flags: bool) -> Path:
    csrc = ROOT / "csrc"
    without_torch = [csrc / "layout.cpp", csrc / "cpu" / "passes.cpp"]
    sources = [DRIVER, *sorted(csrc.glob("cpu/kernels*.cpp")), *without_torch]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        own = _build.X86_FLAGS.get(f"cpu/{source.name}", ()) if own_flags else ()
        command = [
            compiler,
            "-std=c++17",
            f"-I{csrc}",
            *flags,
            *own,
            "-c",
            str(source),
            "-o",
            str(target),
        ]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "kernels_test"
    link = [compiler, *flags, *map(str, objects), "-o", str(program), "-pthread"]
    subprocess.run(link, check=True)
    return program


def can_link(compiler: str, flags: list[str], folder: Path) -> bool:
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    command = [compiler, *flags, str(empty), "-o", str(folder / "empty"), "-pthread"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels(variant: str, tmp_path: Path) -> None:
    compiler, flags, runner = VARIANTS[variant]
    for tool in [compiler, *runner]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not can_link(compiler, flags, tmp_path):
        pytest.skip(f"{compiler} cannot link with {' '.join(flags)}")
    program = compile_driver(compiler, flags, tmp_path, own_flags=X86 and variant != "aarch64")
    done = subprocess.run([*runner, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" passed, 0 failed\n")
    assert int(done.stdout.split()[-4]) > 3_000_000  # it has run to the end, over every case
