"""How csrc becomes a library, described once: for setup.py (built ahead) and first use (cached).

Here: what every library needs, and the one for CPUs; `_build_cuda` has the one for GPUs. Standard
library only: setup.py loads both files by path, before fastclip or torch can be imported.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # libtorch stable ABI: runs on 2.10 and later
)
OPTIMIZE = ("-O3",)
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# One file per SIMD level, chosen at run time; on other processors these files are empty.
X86_FLAGS = {
    "cpu/kernels_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "cpu/kernels_avx512.cpp": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        *("-mfma", "-mf16c"),
    ),
}
MESSAGE_LINES = 12


class BuildError(RuntimeError):
    """The library could not be built; the message says why in words for the user."""


def source_dir() -> Path | None:
    """The C++ sources: beside this file in an installed package, one level up in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    return None


def sources(csrc: Path) -> list[Path]:
    return [*sorted(csrc.glob("*.cpp")), *sorted((csrc / "cpu").glob("*.cpp"))]


def source_hash(csrc: Path) -> str:
    """Names the sources and the flags; compiled into the library as FASTCLIP_SOURCE_HASH."""
    found = [*csrc.iterdir(), *(csrc / "cpu").rglob("*")]
    own = [path for path in found if path.suffix in (".h", ".cpp")]
    return hash_of(csrc, own, (FLAGS, OPTIMIZE, sorted(X86_FLAGS.items())))


def hash_of(csrc: Path, files: Sequence[Path], flags: object) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted(files):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def is_current(library: Path, csrc: Path) -> bool:
    """Whether the library was built from these sources; found without loading it.

    One that is loaded cannot be replaced in the same process: its operators are registered.
    """
    return source_hash(csrc).encode() in library.read_bytes()


def compiler() -> str | None:
    """$CXX (which may carry arguments), else the first of c++, g++, clang++ on PATH, else None."""
    if os.name == "nt":
        return None  # the flags above are those of GCC and Clang
    chosen = os.environ.get("CXX", "").strip()
    for candidate in [chosen] if chosen else ["c++", "g++", "clang++"]:
        words = _words(candidate)
        if words and shutil.which(words[0]):
            return candidate
    return None


def _words(command: str) -> list[str]:
    """As a shell splits it; none of what a shell would refuse."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def missing_compiler() -> str | None:
    """Why there is no compiler, or None if there is one."""
    if compiler():
        return None
    if os.name == "nt":
        return "building on Windows is not supported"
    if os.environ.get("CXX", "").strip():
        return f"there is no C++ compiler: CXX={os.environ['CXX']} was not found"
    return "there is no C++ compiler: none of c++, g++, clang++ is on PATH"


def build(target: Path, *, torch_dir: Path, sanitize: bool = False) -> None:
    """Compile and link the CPU's part of csrc into `target`, which appears whole or not at all."""
    csrc = existing_source_dir()
    command = compiler_command()
    mode = SANITIZE if sanitize else OPTIMIZE
    flags = [*FLAGS, *mode, *host_flags(csrc, torch_dir, source_hash(csrc))]
    assemble(
        target,
        sources(csrc),
        lambda source: [*command, *flags, *_own_flags(source.relative_to(csrc).as_posix())],
        [*command, *_link_flags(torch_dir), *(SANITIZE if sanitize else ())],
        _libraries(),
    )


def host_flags(csrc: Path, torch_dir: Path, source_hash: str) -> list[str]:
    """What a C++ file that includes torch's headers needs beside FLAGS."""
    if not (torch_dir / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"{torch_dir} has no stable-ABI headers (torch 2.10 and later have them)")
    hashed = f'-DFASTCLIP_SOURCE_HASH="{source_hash}"'
    # In messages stand the names of files: those of the package, not of the machine that built it.
    names = [f"-ffile-prefix-map={csrc}=csrc", f"-ffile-prefix-map={torch_dir}=torch"]
    return [hashed, *names, f"-I{csrc}", "-isystem", str(torch_dir / "include")]


def assemble(
    target: Path,
    sources: Sequence[Path],
    compile_command: Callable[[Path], list[str]],
    link_command: list[str],
    libraries: Sequence[str],
) -> None:
    """Compile `sources`, several at once, and link them; `target` appears whole or not at all."""
    with _scratch(target.parent) as scratch:
        objects = [str(scratch / f"{number}.o") for number in range(len(sources))]

        def compile_one(source: Path, output: str) -> None:
            run([*compile_command(source), "-c", str(source), "-o", output])

        with ThreadPoolExecutor(jobs()) as pool:
            list(pool.map(compile_one, sources, objects))  # list(): raises what a thread did
        library = scratch / target.name
        run([*link_command, "-o", str(library), *objects, *libraries])
        if not library.is_file():
            raise BuildError(f"{link_command[0]} made no library and reported no error")
        library.replace(target)


def cached_library(torch_version: str, torch_dir: Path) -> Path:
    """The library for this torch, machine, compiler and csrc; built if the cache lacks it."""
    csrc = existing_source_dir()
    return cached(
        f"torch-{torch_version}-{platform.machine()}-{source_hash(csrc)}-{compiler_hash()}",
        f"the C++ kernels once for torch {torch_version} (a few seconds)",
        lambda target: build(target, torch_dir=torch_dir),
    )


def cached(key: str, what: str, build_it: Callable[[Path], None]) -> Path:
    """The library of that name in the cache; built, with one line that says `what`, if missing."""
    asked = time.time()
    folder = cache_dir()
    found = _intact(folder, key)
    if found is not None:
        return found
    with _locked(folder, key):
        found = _intact(folder, key)  # another process may have built it while this one waited
        if found is not None:
            return found
        with _failure_shared(folder / f"{key}.failed", asked):
            logging.getLogger("fastclip").warning("fastclip: compiling %s, into %s", what, folder)
            with _scratch(folder) as scratch:
                library = scratch / "library"
                build_it(library)
                final = folder / f"{key}-{_content_hash(library)}.so"
                library.replace(final)
    return final


def cache_dir() -> Path:
    """$FASTCLIP_CACHE, else $XDG_CACHE_HOME/fastclip, else ~/.cache/fastclip."""
    if os.environ.get("FASTCLIP_CACHE"):
        return Path(os.environ["FASTCLIP_CACHE"]).absolute()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).absolute() / "fastclip"
    try:
        return Path.home() / ".cache" / "fastclip"
    except RuntimeError as error:  # a user id without an entry in the password file, and no $HOME
        raise BuildError("there is no home folder for the cache; set FASTCLIP_CACHE") from error


def existing_source_dir() -> Path:
    csrc = source_dir()
    if csrc is None:
        raise BuildError(f"there are no C++ sources beside {Path(__file__).resolve().parent}")
    return csrc


def compiler_command() -> list[str]:
    reason = missing_compiler()
    if reason:
        raise BuildError(reason)
    return _words(compiler() or "")


def compiler_hash() -> str:
    """Names the compiler: its command line and what it says of its version."""
    command = compiler_command()
    text = run([*command, "--version"])
    return hashlib.sha256(f"{command} {text}".encode()).hexdigest()[:8]


def _own_flags(name: str) -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return X86_FLAGS.get(name, ()) if x86 else ()


def _link_flags(torch_dir: Path) -> list[str]:
    # No rpath: torch has loaded libtorch_cpu before this library, and wheels change machines.
    if sys.platform == "darwin":
        return ["-dynamiclib", "-undefined", "dynamic_lookup"]
    return ["-shared", f"-L{torch_dir / 'lib'}"]


def _libraries() -> list[str]:
    return [] if sys.platform == "darwin" else ["-ltorch_cpu"]


def jobs() -> int:
    text = os.environ.get("MAX_JOBS", "")
    if not text:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text} is not a whole number of at least 1")
    return int(text)


def run(command: list[str]) -> str:
    """Run a compiler; its output, or BuildError with the last lines of it."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error.strerror}") from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        lines = output.strip().splitlines()[-MESSAGE_LINES:]
        shown = "\n  ".join(lines) or "no output"
        otherwise = "the library" if "-o" in command else command[-1]  # such as --version
        what = next((word for word in command if word.endswith((".cpp", ".cu"))), otherwise)
        raise BuildError(f"{command[0]} failed on {what} (exit {done.returncode}):\n  {shown}")
    return output


@contextmanager
def _using(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"the folder {folder} cannot be used: {error.strerror} ({error.filename}); "
            "FASTCLIP_CACHE names another"
        ) from error


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as its results, which then move in one step."""
    with _using(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix=".build-")
    with scratch as name:
        yield Path(name)


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    """One process at a time; the lock goes when the process does, however it ends."""
    import fcntl  # not on Windows, where compiler_command() has refused before

    with _using(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        yield


@contextmanager
def _failure_shared(note: Path, asked: float) -> Iterator[None]:
    """A build that failed while this process waited for it is not tried again by this process.

    Without this, many processes that start together would fail one after the other, each after
    its own compilation. A process that starts later does try.
    """
    if note.exists() and note.stat().st_mtime >= asked:
        raise BuildError(note.read_text(encoding="utf-8"))
    try:
        yield
    except BuildError as error:
        with suppress(OSError):  # on a full disk the others fail for themselves
            note.write_text(str(error), encoding="utf-8")
        raise
    note.unlink(missing_ok=True)


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _intact(folder: Path, key: str) -> Path | None:
    """The cached library, if its content is what its name says: loading a damaged one can crash."""
    with _using(folder):
        for path in folder.glob(f"{key}-*.so"):
            if path.stem == f"{key}-{_content_hash(path)}":
                return path
    return None
