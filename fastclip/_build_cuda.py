"""How csrc/cuda becomes a library: nvcc, the architectures and the flags. `_build` has the rest.

The library needs no CUDA at run time beyond the driver (cudart is linked statically, libtorch_cuda
not at all), so it is built against a CPU-only torch as well, and loads beside one.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _build  # relative: setup.py loads both files under another name
from ._build import BuildError

VARIABLE = "TORCH_CUDA_ARCH_LIST"
DEFAULT = "8.0;9.0;10.0;12.0+PTX"
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# No symbol of cudart is visible: the loader could bind it to the other cudart that torch has.
LINK_FLAGS = ("-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL")

Capability = tuple[int, int]

OLDEST: Capability = (7, 0)
OLDEST_TEXT = "compute capability 7.0 or later"
# Torch's names for architectures in the variable.
NAMES = {
    **{"Volta": "7.0+PTX", "Turing": "7.5+PTX", "Ampere": "8.0;8.6+PTX", "Ada": "8.9+PTX"},
    **{"Hopper": "9.0+PTX", "Blackwell": "10.0;10.3;12.0;12.1+PTX"},
}


@dataclass(frozen=True, order=True)
class Arch:
    """Code for one compute capability; `suffix` "a": for it alone, "f": for its family."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False  # the driver compiles for what is newer

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        return f"{self.major}{self.minor}{self.suffix}"

    def flags(self) -> list[str]:
        code = f"[sm_{self.number},compute_{self.number}]" if self.ptx else f"sm_{self.number}"
        return ["-gencode", f"arch=compute_{self.number},code={code}"]

    def runs_on(self, device: Capability) -> bool:
        own = (self.major, self.minor)
        if self.suffix == "a":
            return device == own
        newer = device >= own
        return newer and (device[0] == self.major or (self.ptx and not self.suffix))


def parse(text: str) -> list[Arch]:
    """Torch's way to list architectures: "8.0 9.0+PTX", with spaces or semicolons between them."""
    found = []
    words = re.split(r"[;\s]+", text.strip("; \t\n"))
    for word in ";".join(NAMES.get(word, word) for word in words).split(";"):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if not match:
            raise BuildError(
                f"{VARIABLE}={text}: {word!r} is not a compute capability such as 8.0 or 9.0+PTX"
            )
        arch = Arch(int(match[1]), int(match[2]), match[3], bool(match[4]))
        if (arch.major, arch.minor) < OLDEST:
            raise BuildError(f"{VARIABLE}={text}: the kernels need {OLDEST_TEXT}, not {word}")
        found.append(arch)
    return sorted(set(found))


def render(archs: Iterable[Arch]) -> str:
    return ", ".join(map(str, archs))


def nvcc() -> str | None:
    """In $CUDA_HOME/bin if that is set, else on PATH, else in /usr/local/cuda/bin, else None."""
    home = os.environ.get("CUDA_HOME", "").strip()
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def missing_nvcc() -> str | None:
    """Why there is no CUDA compiler, or None if there is one."""
    if nvcc():
        return None
    home = os.environ.get("CUDA_HOME", "").strip()
    where = f"$CUDA_HOME/bin ({home}/bin)" if home else "PATH and in /usr/local/cuda/bin"
    return f"there is no CUDA compiler: nvcc was not found {'in' if home else 'on'} {where}"


def version() -> str:
    """Of nvcc, such as "13.0"."""
    said = _said("--version")
    found = re.search(r"release (\d+\.\d+)", said)
    if not found:
        raise BuildError(f"{nvcc()} --version names no release: {said.strip() or 'no output'}")
    return found[1]


def known() -> list[str]:
    """The architectures that this nvcc compiles for, oldest first, as "80" and "90a"."""
    listed = re.findall(r"compute_(\d+[af]?)", _said("--list-gpu-arch"))
    return sorted(set(listed), key=lambda name: (int(name.rstrip("af")), name))


def chosen() -> tuple[list[Arch], list[Arch]]:
    """What to build ahead for, and what of the default this nvcc does not know.

    Raises `BuildError` if it does not know what TORCH_CUDA_ARCH_LIST asks for.
    """
    asked = os.environ.get(VARIABLE, "").strip("; \t\n")
    archs = parse(asked or DEFAULT)
    usable = [arch for arch in archs if _is_known(arch)]
    unknown = [arch for arch in archs if arch not in usable]
    if unknown and (asked or not usable):
        raise BuildError(
            f"{VARIABLE}={asked or DEFAULT}: nvcc {version()} does not know {render(unknown)}, "
            f"only {', '.join(known())}"
        )
    if unknown and not usable[-1].suffix:  # PTX of the newest, for what is newer still
        usable[-1] = Arch(usable[-1].major, usable[-1].minor, ptx=True)
    return usable, unknown


def obstacle() -> str | None:
    """Why nothing can be built ahead here, or None."""
    try:
        chosen()
        version()
    except BuildError as error:
        return str(error)
    return None


def local(devices: Iterable[Capability]) -> list[Arch]:
    """What to compile for at first use: these devices' own code.

    For a device newer than nvcc it is the PTX of the newest architecture that both know. One that
    is too old is left out as long as there is another.
    """
    found, too_old = set(), []
    numbers = [int(name) for name in known() if name.isdecimal()]
    for major, minor in sorted(set(devices)):
        fitting = [number for number in numbers if number <= 10 * major + minor]
        if (major, minor) < OLDEST:
            too_old.append(f"the kernels need {OLDEST_TEXT}, and this device has {major}.{minor}")
        elif not fitting:
            too_old.append(f"nvcc {version()} does not know sm_{major}{minor}, this device's")
        else:
            best = divmod(max(fitting), 10)
            found.add(Arch(*best, ptx=best != (major, minor)))
    if not found:
        raise BuildError("; ".join(too_old))
    return sorted(found)


def sources(csrc: Path) -> list[Path]:
    return [path for path in files(csrc) if path.suffix in (".cpp", ".cu")]


def files(csrc: Path) -> list[Path]:
    """Everything that the library is made of: what serves every device, and csrc/cuda."""
    shared = [path for path in csrc.iterdir() if path.name != "ops.cpp"]
    found = [*shared, *(csrc / "cuda").rglob("*")]
    return sorted(path for path in found if path.suffix in SUFFIXES)


def source_hash(csrc: Path) -> str:
    """Names the sources and the flags, the architectures apart."""
    return _build.hash_of(csrc, files(csrc), (_build.FLAGS, _build.OPTIMIZE, LINK_FLAGS))


def stamp(csrc: Path, archs: Sequence[Arch]) -> str:
    """What a library is built from and for; compiled into it as FASTCLIP_SOURCE_HASH."""
    return f"{source_hash(csrc)} for {';'.join(map(str, archs))}"


def built_for(library: Path, csrc: Path) -> list[Arch] | None:
    """The architectures of a library built from these sources, None if from others.

    Found without loading it, as `_build.is_current`.
    """
    found = re.search(rf"{source_hash(csrc)} for ([\w.+;]+)".encode(), library.read_bytes())
    return parse(found[1].decode()) if found else None


def build(target: Path, archs: Sequence[Arch], *, torch_dir: Path) -> None:
    """Compile and link csrc/cuda for `archs` into `target`, which appears whole or not at all."""
    csrc = _build.existing_source_dir()
    nvcc_ = nvcc_command()
    host = [*_build.compiler_command(), *_build.FLAGS, *_build.OPTIMIZE]
    host += _build.host_flags(csrc, torch_dir, stamp(csrc, archs))
    n_at_once = max(1, _build.jobs() // max(1, len(sources(csrc))))
    code = [flag for arch in archs for flag in arch.flags()]
    device = [*nvcc_, *device_flags(csrc), *code, f"--threads={n_at_once}"]
    _build.assemble(
        target,
        sources(csrc),
        lambda source: device if source.suffix == ".cu" else host,
        [*nvcc_, *LINK_FLAGS, *code, f"-L{torch_dir / 'lib'}"],
        ["-ltorch_cpu"],
    )


def device_flags(csrc: Path) -> list[str]:
    """For nvcc: those of the C++ files. Torch's headers are not for it."""
    flags = [f"-I{csrc}"]
    for flag in (*_build.FLAGS, *_build.OPTIMIZE):
        flags += ["-Xcompiler", flag] if flag.startswith("-f") else [flag]
    return flags


def nvcc_command() -> list[str]:
    """nvcc with the host compiler that the rest is compiled with."""
    if reason := missing_nvcc():
        raise BuildError(reason)
    words = _build.compiler_command()
    # Before the compiler there may be a launcher, or env and what it sets.
    while len(words) > 1 and not words[1].startswith("-"):
        words = words[1:]
    # nvcc takes a comma for the end of one flag.
    flags = [flag.replace(",", "\\,") for flag in words[1:]]
    return [str(nvcc()), "-ccbin", words[0], *(w for f in flags for w in ("-Xcompiler", f))]


def cached_library(torch_version: str, torch_dir: Path, archs: Sequence[Arch]) -> Path:
    """The library for these architectures, torch, csrc and compilers; built if not in the cache."""
    csrc = _build.existing_source_dir()
    tools = hashlib.sha256(f"{_said('--version')} {_build.compiler_hash()}".encode()).hexdigest()
    key = f"cuda-{'-'.join(map(str, archs))}-torch-{torch_version}-{platform.machine()}"
    return _build.cached(
        f"{key}-{source_hash(csrc)}-{tools[:8]}",
        f"the CUDA kernels once for compute capability {render(archs)} and torch {torch_version} "
        "(up to a minute)",
        lambda target: build(target, archs, torch_dir=torch_dir),
    )


def _is_known(arch: Arch) -> bool:
    return arch.number in known() or (bool(arch.suffix) and arch.number.rstrip("af") in known())


def _said(flag: str) -> str:
    if reason := missing_nvcc():
        raise BuildError(reason)
    return _asked(str(nvcc()), flag)


@functools.cache
def _asked(command: str, flag: str) -> str:
    return _build.run([command, flag])
