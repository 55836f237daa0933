"""Standard output that takes nothing: a full disk, a closed descriptor, a reader that has gone."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fastclip.cli import COMMANDS, main
from fastclip.monitor import JSONL
from tests.monitor.making import healthy

FULL = Path("/dev/full")  # every write to it fails as on a full disk
NO_SPACE = "fastclip: cannot write to standard output: No space left on device\n"
# A command's arguments, LOG standing for a log. `check`, `demo` and `bench` take long to begin.
ANSWERS = ["--help", "--version", "demo --help", "check --help", "bench --list", "doctor --json"]
ANSWERS += [
    f"{of} LOG{json}" for of in ("replay", "calibrate", "diagnose") for json in ("", " --json")
]
ANSWERS += ["report LOG -o PAGE"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    log = JSONL(tmp_path / "run.jsonl")
    with log:
        for record in healthy(1200):
            log.write(record, [])
    return {"LOG": str(log.path), "PAGE": str(tmp_path / "run.html")}


def test_every_command_is_asked() -> None:
    assert {answer.split()[0] for answer in ANSWERS} - {"--help", "--version"} == {*COMMANDS}


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_full_disk_is_one_line(
    answer: str,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [files.get(word, word) for word in answer.split()]
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 2
        assert sys.stdout is full
    assert capsys.readouterr().err.endswith(NO_SPACE)


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_closed_output_is_refused_before_anything_is_done(
    answer: str,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main([files.get(word, word) for word in answer.split()]) == 2
    assert capsys.readouterr() == ("", "fastclip: standard output is closed\n")
    assert not Path(files["PAGE"]).exists()


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_has_gone_is_silent(json: list[str], files: dict[str, str]) -> None:
    command = [sys.executable, "-m", "fastclip", "replay", files["LOG"], *json]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 141


def test_an_error_of_the_command_stays_one(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A page that cannot be written is no fault of the standard output."""
    assert main(["report", files["LOG"], "-o", "/dev/null/page.html"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("fastclip: cannot write")
    assert "page.html" in errors


# Those that differ in what they say on stderr: nothing, progress, faults of a log, and errors.
WITHOUT_STDERR = {
    "doctor --json": 0,
    "replay LOG --json": 0,
    "report LOG -o PAGE": 0,
    "demo --json": 0,
    "replay DAMAGED --json": 0,
    "replay nothing.jsonl": 2,
    "nonsense": 2,
}


@pytest.mark.parametrize("answer", WITHOUT_STDERR)
def test_a_closed_stderr_changes_nothing_else(
    answer: str, files: dict[str, str], tmp_path: Path
) -> None:
    """As `2>&-` does it: the same status and the same output, and no file in its place."""
    damaged = Path(files["LOG"]).read_text() + "no record\n"
    (tmp_path / "damaged.jsonl").write_text(damaged)
    files |= {"DAMAGED": str(tmp_path / "damaged.jsonl")}
    arguments = [files.get(word, word) for word in answer.split()]
    command = shlex.join([sys.executable, "-m", "fastclip", *arguments])
    said = []
    for closing in ("2>&-", f"2>{tmp_path / 'said'}"):
        shell = ["sh", "-c", f"{command} {closing}"]
        done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == WITHOUT_STDERR[answer]
        said.append(re.sub(r"\d[\d.e+-]*", "N", done.stdout))
    assert said[0] == said[1]
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_a_stderr_that_was_closed_since_is_as_none(
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (tmp_path / "said").open("w") as closed:
        pass
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["replay", "nothing.jsonl"]) == 2
        assert main(["replay", files["LOG"]]) == 0
        assert sys.stderr is stream
        assert capsys.readouterr().out.startswith(files["LOG"])
