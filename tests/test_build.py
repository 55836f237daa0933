"""How csrc becomes a library: the compiler, the names of the sources, the cache, the refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastclip import _build

TORCH_DIR = Path(torch.__file__).parent
CACHED = """
import sys
from pathlib import Path
from fastclip import _build
print(_build.cached_library(sys.argv[1], Path(sys.argv[2])))
"""

needs_compiler = pytest.mark.skipif(
    _build.compiler() is None,
    reason=f"the C++ kernels cannot be built: {_build.missing_compiler()}",
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH, and no CXX."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def logged_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes CXX the real compiler without optimisation, each call a line in the file returned."""
    log = tmp_path / "compiler.log"
    real = _build.compiler()
    wrapper = script(tmp_path / "logged", f'echo "$@" >> {log}\nexec {real} "$@" -O0')
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    return log


def toy_csrc(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    (folder / "cpu").mkdir(parents=True)
    (folder / "ops.cpp").write_text(text)
    monkeypatch.setattr(_build, "source_dir", lambda: folder)
    return folder


def test_compiler_is_the_first_on_path(tools: Path) -> None:
    assert _build.compiler() is None
    assert _build.missing_compiler() == (
        "there is no C++ compiler: none of c++, g++, clang++ is on PATH"
    )
    script(tools / "clang++", "exit 0")
    assert _build.compiler() == "clang++"
    script(tools / "g++", "exit 0")
    assert _build.compiler() == "g++"
    assert _build.missing_compiler() is None


def test_cxx_comes_before_path(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tools / "c++", "exit 0")
    script(tools / "mine", "exit 0")
    monkeypatch.setenv("CXX", "mine --quiet")
    assert _build.compiler() == "mine --quiet"
    monkeypatch.setenv("CXX", "missing-compiler")
    assert _build.compiler() is None
    assert _build.missing_compiler() == (
        "there is no C++ compiler: CXX=missing-compiler was not found"
    )


def test_hash_names_every_source_and_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(_build.existing_source_dir(), csrc)
    first = _build.source_hash(csrc)
    assert first == _build.source_hash(_build.existing_source_dir())
    for path in (csrc / "table.h", csrc / "cpu" / "kernels_avx2.cpp"):
        text = path.read_text()
        path.write_text(text + "\n")
        assert _build.source_hash(csrc) != first
        path.write_text(text)
    (csrc / "cpu" / "new.h").write_text("")
    assert _build.source_hash(csrc) != first
    (csrc / "cpu" / "new.h").unlink()
    assert _build.source_hash(csrc) == first
    monkeypatch.setattr(_build, "OPTIMIZE", ("-O2",))
    assert _build.source_hash(csrc) != first


@needs_compiler
def test_failed_compilation_shows_the_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_csrc(tmp_path / "csrc", monkeypatch, "\n" * 20 + '#error "no such luck"\n')
    target = tmp_path / "out" / "library.so"
    with pytest.raises(_build.BuildError, match="no such luck") as caught:
        _build.build(target, torch_dir=TORCH_DIR)
    assert "ops.cpp" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= _build.MESSAGE_LINES + 1
    assert list(target.parent.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_bad_max_jobs(jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(_build.BuildError, match=f"MAX_JOBS={jobs} is not a whole number"):
        _build.build(tmp_path / "library.so", torch_dir=TORCH_DIR)


@needs_compiler
def test_torch_without_stable_headers(tmp_path: Path) -> None:
    with pytest.raises(_build.BuildError, match="has no stable-ABI headers"):
        _build.build(tmp_path / "library.so", torch_dir=tmp_path)


@needs_compiler
def test_library_tells_which_sources_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'extern "C" const char* source() { return FASTCLIP_SOURCE_HASH; }\n'
    csrc = toy_csrc(tmp_path / "csrc", monkeypatch, text)
    library = tmp_path / "library.so"
    _build.build(library, torch_dir=TORCH_DIR)
    assert _build.is_current(library, csrc)
    (csrc / "ops.cpp").write_text(text + "\n")
    assert not _build.is_current(library, csrc)


@needs_compiler
def test_many_processes_compile_once(logged_compiler: Path) -> None:
    command = [sys.executable, "-c", CACHED, torch.__version__, str(TORCH_DIR)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    answers = {process.communicate(timeout=300)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 5
    assert len(answers) == 1
    assert Path(answers.pop().strip()).is_file()
    calls = [line for line in logged_compiler.read_text().splitlines() if line != "--version"]
    n_sources = len(_build.sources(_build.existing_source_dir()))
    assert len(calls) == n_sources + 1  # one more: the linker


@needs_compiler
def test_processes_that_wait_share_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "compiler.log"
    monkeypatch.setenv("CXX", str(tmp_path / "failing"))
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MAX_JOBS", "1")
    command = [sys.executable, "-c", CACHED, torch.__version__, str(TORCH_DIR)]

    def compilations(processes: int) -> int:
        """How often a compiler is called that fails once all processes have asked for its name."""
        all_here = f"until [ $(grep -c version {log}) = {processes} ]; do sleep 0.05; done"
        fail = f'if [ "$1" != --version ]; then {all_here}; echo "out of luck"; exit 1; fi'
        script(tmp_path / "failing", f'echo "$1" >> {log}\n{fail}')
        log.write_text("")
        running = [
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(processes)
        ]
        for process in running:
            assert "out of luck" in process.communicate(timeout=300)[1]
            assert process.returncode == 1
        return sum(line != "--version" for line in log.read_text().splitlines())

    # One source fails; the one thread may have begun the next before it hears of that.
    assert compilations(4) in (1, 2)
    assert compilations(1) in (1, 2)  # who starts after the failure does try


@needs_compiler
def test_damaged_library_is_built_again(
    logged_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_csrc(tmp_path / "csrc", monkeypatch, "int answer() { return 42; }\n")
    library = _build.cached_library("1.0", TORCH_DIR)
    whole = library.read_bytes()
    calls = len(logged_compiler.read_text().splitlines())
    assert _build.cached_library("1.0", TORCH_DIR) == library
    assert len(logged_compiler.read_text().splitlines()) == calls + 1  # --version alone
    library.write_bytes(whole[: len(whole) // 2])
    again = _build.cached_library("1.0", TORCH_DIR)
    assert len(again.read_bytes()) == len(whole)
    assert len(logged_compiler.read_text().splitlines()) == calls + 4  # --version, one file, link
    assert sorted(path.suffix for path in again.parent.iterdir()) == [".lock", ".so"]


@needs_compiler
def test_cache_is_kept_per_torch_and_per_compiler(
    logged_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_csrc(tmp_path / "csrc", monkeypatch, "int answer() { return 42; }\n")
    first = _build.cached_library("1.0", TORCH_DIR)
    assert _build.cached_library("1.1", TORCH_DIR) != first
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DOTHER")
    assert _build.cached_library("1.0", TORCH_DIR) != first


@needs_compiler
def test_unusable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    monkeypatch.setenv("FASTCLIP_CACHE", str(cache))
    with pytest.raises(_build.BuildError) as caught:
        _build.cached_library(torch.__version__, TORCH_DIR)
    assert str(caught.value).startswith(f"the folder {cache} cannot be used: Not a directory")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("FASTCLIP_CACHE", "")
    assert _build.cache_dir() == tmp_path / ".cache" / "fastclip"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _build.cache_dir() == tmp_path / "xdg" / "fastclip"
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "own"))
    assert _build.cache_dir() == tmp_path / "own"


def test_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "__file__", str(tmp_path / "fastclip" / "_build.py"))
    assert _build.source_dir() is None
    with pytest.raises(_build.BuildError, match="there are no C\\+\\+ sources beside"):
        _build.cached_library(torch.__version__, TORCH_DIR)


@needs_compiler
@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("printf '\\377\\376 broken'; exit 1", "broken"),
        ("exit 0", "made no library and reported no error"),
    ],
    ids=["bytes-that-are-no-text", "silent"],
)
def test_a_strange_compiler_is_a_reason(
    behaviour: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "strange", behaviour)))
    with pytest.raises(_build.BuildError, match=told):
        _build.build(tmp_path / "library.so", torch_dir=TORCH_DIR)


def test_cxx_that_no_shell_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    assert _build.compiler() is None
    assert "CXX=g++ '" in str(_build.missing_compiler())
