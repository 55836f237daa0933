"""The command line: exit statuses, messages, and what doctor reports."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastclip
from fastclip import _build_cuda
from fastclip.backends import cuda
from fastclip.cli import main
from fastclip.commands import doctor

COMMAND = [sys.executable, "-m", "fastclip"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """The native library, if it can be: no command below has to say that it builds it."""
    fastclip.backends.available()


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """A PYTHONPATH on which `import torch` fails as it does where torch is not installed."""
    text = """raise ModuleNotFoundError("No module named 'torch'", name="torch")\n"""
    (tmp_path / "torch.py").write_text(text)
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("arguments", ["--help", "--version", "demo --help", "nonsense", ""])
def test_answers_without_importing_torch(arguments: str) -> None:
    code = (
        "import sys\n"
        "from fastclip.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1:] == ["False"]


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"fastclip {fastclip.__version__}\n")


def test_help_lists_the_commands() -> None:
    done = run("--help", COLUMNS="80")
    assert done.returncode == 0
    commands = ("demo", "doctor", "check", "bench", "replay", "calibrate", "report", "diagnose")
    for command in commands:
        assert re.search(rf"^    {command}\s", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Exit status: 0 done, whatever a log told; 1 from check" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "demo, doctor, check"),
        ("nonsense", "nonsense"),
        ("doctor --verbose", "--verbose"),
        ("demo twice", "twice"),
        ("--json", "--json"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments: str, named: str) -> None:
    done = run(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fastclip: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_backend_that_cannot_be_had_is_one_line_and_status_2() -> None:
    done = run("demo", FASTCLIP_BACKEND="nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fastclip: ")
    assert done.stderr.count("\n") == 1
    assert "nonsense" in done.stderr
    assert "reference" in done.stderr  # what is available instead


def test_missing_torch_is_one_line_and_status_2(no_torch: str) -> None:
    done = run("demo", PYTHONPATH=no_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fastclip: PyTorch is missing; install it with `pip install torch`\n"


# A background job of a shell without job control, as some CI runs the tests, ignores SIGINT.
INTERRUPTED = """
import signal, sys, time
from fastclip import cli
from fastclip.commands import doctor

def run(json):
    print("at work", file=sys.stderr, flush=True)
    time.sleep(60)

doctor.run = run
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(["doctor"]))
"""


def test_interrupt_gives_130_without_a_traceback() -> None:
    """While the command is in Python: an import cut short by a signal ends in many ways."""
    command = [sys.executable, "-c", INTERRUPTED]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    with child:
        assert child.stderr.readline() == "at work\n"
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode == 130
    assert rest == "fastclip: interrupted\n"


def test_closed_pipe_is_no_traceback() -> None:
    child = subprocess.Popen(
        [*COMMAND, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        child.stdout.close()
        errors = child.stderr.read()
    assert child.returncode == 141
    assert "BrokenPipe" not in errors


@pytest.mark.parametrize("status", [0, 1])
def test_check_is_wired(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str | None]] = []

    def check(json: bool, backend: str | None) -> int:
        seen.append((json, backend))
        return status

    monkeypatch.setitem(sys.modules, "fastclip.commands.check", SimpleNamespace(run=check))
    assert main(["check"]) == status
    assert main(["check", "--json", "--backend", "cpu"]) == status
    assert seen == [(False, None), (True, "cpu")]


def test_other_missing_modules_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastclip.commands.check", None)
    with pytest.raises(ModuleNotFoundError, match=r"fastclip\.commands\.check"):
        main(["check"])


def test_doctor_json_says_what_the_package_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["fastclip"] == fastclip.__version__
    assert report["versions"]["torch"] == str(torch.__version__)
    assert report["versions"]["python"] == sys.version.split()[0]
    assert report["threads"] == torch.get_num_threads()
    assert report["backends"] == fastclip.backends.available()
    assert report["backends"]["reference"] is None
    choices = {
        name: (entry["backend"], entry["reason"]) for name, entry in report["choice"].items()
    }
    assert choices == fastclip.backends.explain()
    assert bool(report["gpus"]) == torch.cuda.is_available()
    if report["backends"]["cpu"] is None:
        assert report["simd_level"] in ("avx512", "avx2", "plain")
        assert report["simd_level"] in report["native_library"]
    else:
        assert (report["simd_level"], report["native_library"]) == (None, None)
    nvcc = _build_cuda.nvcc()
    assert report["cuda_compiler"] == (
        f"nvcc {_build_cuda.version()}, {nvcc}" if nvcc else f"none: {_build_cuda.missing_nvcc()}"
    )
    if report["backends"]["cuda"] is not None:
        assert report["cuda_library"] == cuda.built_ahead()


def test_doctor_text_fits_and_shows_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name, reason in fastclip.backends.available().items():
        assert f"\n  {name:<12}{'available' if reason is None else 'no: '}" in text
    for line in text.splitlines():
        assert len(line) <= 80 or len(line.split()) == 1, line  # one long path is as it is


def test_doctor_reports_the_variables_in_force() -> None:
    done = run("doctor", "--json", FASTCLIP_BACKEND="reference", FASTCLIP_BACKND="cpu")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["environment"]["FASTCLIP_BACKEND"] == "reference"
    assert report["choice"]["cpu"]["backend"] == "reference"
    assert {
        "what": "environment",
        "problem": "FASTCLIP_BACKND is not a variable that fastclip reads",
    } in report["problems"]


def test_doctor_survives_a_request_that_cannot_be_met() -> None:
    done = run("doctor", FASTCLIP_BACKEND="nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stdout
    assert done.stdout.endswith("every call would fail: see the problem above.\n")
    assert "Traceback" not in done.stderr


def test_doctor_lists_the_simd_levels_when_asked_for_another() -> None:
    done = run("doctor", "--json", FASTCLIP_SIMD="sse")
    report = json.loads(done.stdout)
    if report["backends"]["cpu"] and "compiler" in report["backends"]["cpu"]:
        pytest.skip("no C++ compiler")
    assert done.returncode == 1
    assert report["backends"]["cpu"].startswith("FASTCLIP_SIMD=sse: the SIMD levels here are ")
    assert report["backends"]["cpu"].endswith("plain")


def test_doctor_escapes_what_the_terminal_cannot_show() -> None:
    done = run(
        "doctor",
        FASTCLIP_BACKEND="n\N{LATIN SMALL LETTER O WITH DIAERESIS}",
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stderr) == (1, "")  # there is no such backend
    assert "FASTCLIP_BACKEND=n\\xf6" in done.stdout


def test_doctor_without_torch_reports_the_rest(no_torch: str) -> None:
    done = run("doctor", "--json", PYTHONPATH=no_torch)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["backends"] is None
    assert report["cpu"]
    assert {
        "what": "backends",
        "problem": "ModuleNotFoundError: No module named 'torch'",
    } in report["problems"]
    assert "No backend works" in run("doctor", PYTHONPATH=no_torch).stdout


def test_doctor_without_a_compiler(tmp_path: Path) -> None:
    """Nothing built, nothing to build with: the reference serves, and doctor says why."""
    done = run("doctor", "--json", CXX="/no/such/compiler", FASTCLIP_CACHE=str(tmp_path))
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["compiler"].startswith("none: ")
    assert "/no/such/compiler" in report["compiler"]
    # A library built ahead, inside the package, needs no compiler.
    built_ahead = "built ahead" in (report["native_library"] or "")
    assert built_ahead or "/no/such/compiler" in report["backends"]["cpu"]


@pytest.mark.parametrize(
    "question",
    [
        *("_cpu_model", "_cpu_features", "_threads", "_compiler", "_cuda_compiler"),
        *("_cuda_library", "_gpus", "_choice"),
    ],
)
def test_a_broken_answer_is_one_line(
    question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise OSError("the disk\nis on fire")

    monkeypatch.setattr(doctor, question, broken)
    assert main(["doctor"]) == (1 if question == "_choice" else 0)
    out = capsys.readouterr().out
    problems = [line for line in out.splitlines() if line.startswith("problem ")]
    assert len(problems) == 1
    assert problems[0].endswith(": OSError: the disk is on fire")


def test_no_backend_at_all_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_available", lambda: {"reference": "gone", "cpu": "gone too"})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "  cpu         no: gone too\n" in out
    assert out.endswith("No backend works: fastclip cannot run here.\n")


def test_doctor_says_when_only_the_slow_backend_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_available", lambda: {"reference": None, "cpu": "no compiler"})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "backends that work: reference.\nWith the backend cpu it would be faster" in out
