"""`fastclip report`: where the page goes, what is printed, faults, no torch, and long logs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastclip.cli import main
from fastclip.monitor import Monitor
from fastclip.monitor.log import encode
from tests.monitor.making import changed, healthy, require_refused
from tests.monitor.report.logs import NAMES, eventful, figures, layers, plain, saved

Capture = pytest.CaptureFixture[str]

pytest.importorskip("plotly")


@pytest.fixture
def log(tmp_path: Path) -> str:
    return saved(tmp_path / "run.jsonl", healthy(100))


def answer(capsys: Capture, *arguments: str) -> Any:
    assert main(["report", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_the_page_is_beside_the_log(log: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.html"
    path.write_text("an old one")
    assert answer(capsys, log) == {"report": str(path), "records": 100, "events": 0}
    text = plain(path.read_text(encoding="utf-8"))
    assert "run.jsonl" in text
    assert "Records 100 steps 0 to 99" in text
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert path.stat().st_mode & 0o777 == Path(log).stat().st_mode & 0o777


def test_or_where_it_is_wanted(tmp_path: Path, capsys: Capture) -> None:
    log = saved(tmp_path / "run.jsonl", eventful())
    path = tmp_path / "other.htm"
    events = len(Monitor().replay(log))
    expected = {"report": str(path), "records": len(eventful()), "events": events}
    assert answer(capsys, log, "-o", str(path)) == expected
    assert path.stat().st_size < 5_000_000
    assert not (tmp_path / "run.html").exists()


def test_a_link_stays_one(log: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    answer(capsys, log, "-o", str(tmp_path / "link.html"))
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").is_file()


def test_a_link_that_leads_nowhere_is_replaced(log: str, tmp_path: Path, capsys: Capture) -> None:
    loop = tmp_path / "loop.html"
    loop.symlink_to(loop)
    answer(capsys, log, "-o", str(loop))
    assert loop.is_file()


def test_two_logs(log: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "old").mkdir()
    other = saved(tmp_path / "old" / "run.jsonl", healthy(50, seed=3))
    found = answer(capsys, log, other)
    assert found["other"] == {"records": 50, "events": 0}
    assert (found["records"], found["report"]) == (100, str(tmp_path / "run.html"))
    text = plain((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert f"{log} beside {other}" in text  # their names are the same


def test_without_json_a_line_says_where_it_is(log: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["report", log]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}: 100 records, 0 events\n"


def test_skipped_lines_are_told(log: str, tmp_path: Path, capsys: Capture) -> None:
    with Path(log).open("a") as file:
        file.write('nonsense\n{"step": 1')
    assert main(["report", log, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["records"] == 100
    assert len(err.splitlines()) == 2
    assert "Lines skipped 2" in plain((tmp_path / "run.html").read_text(encoding="utf-8"))


def test_layers_that_came_later_are_columns_too(tmp_path: Path, capsys: Capture) -> None:
    records = changed(healthy(100), ([90], "layers", layers(90)))
    amended = changed(records, ([80, 85], "layers", layers(80)))
    log = saved(tmp_path / "run.jsonl", records, [amended[80], amended[85]])
    assert answer(capsys, log)["records"] == 100
    heat = figures((tmp_path / "run.html").read_text(encoding="utf-8"))["layers-norms-1"]["data"][0]
    assert heat["x"] == ["80", "85", "90"]
    assert len(heat["y"]) == len(NAMES)


WRONG = {
    "": "the following arguments are required: LOG",
    "{missing}": "cannot read '{missing}': No such file or directory",
    "{folder}": "cannot read '{folder}': Is a directory",
    "{garbage}": "there are no records in '{garbage}': no line of it is a record\n",
    "{log} {garbage} --json": "there are no records in '{garbage}': no line of it is a record\n",
    "{log} {log} {log}": "unrecognized arguments: {log}",
    "{log} -o": "argument -o: expected one argument",
    "{log} -o {folder}": "cannot write '{folder}': it is not a file",
    "{log} -o {log}": "the report would replace the log '{log}'; choose another with -o",
    "{log} {page} -o {page}": "the report would replace the log '{page}'; choose another with -o",
    "{page}": "the report would replace the log '{page}'; choose another with -o",
    "{log} -o {missing}/run.html": "cannot write '{missing}/run.html': there is no folder",
    "{log} -o /dev/null": "cannot write '/dev/null': it is not a file",
    "{log} -o {long}": "cannot write '{long}': File name too long",
    "{long}": "cannot read '{long}': File name too long",
    "{long} -o {missing}": "cannot read '{long}': File name too long",
    "/": "cannot read '/': Is a directory",
    ".": "cannot read '.': Is a directory",
    "/dev/null": "'/dev/null' is not a file to put the report beside; choose one with -o",
    "/dev/null -o {missing}": "there are no records in '/dev/null'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_one_line_and_status_2(
    arguments: str, log: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "garbage").write_text("nonsense\n" * 30)
    paths = {name: str(tmp_path / name) for name in ("missing", "garbage", "folder")}
    (tmp_path / "folder").mkdir()
    paths |= {
        "long": str(tmp_path / ("x" * 300)),
        "log": log,
        "page": saved(tmp_path / "page.html", healthy(10)),
    }
    before = sorted(tmp_path.iterdir())
    command = f"report {arguments.format(**paths)}"
    require_refused(command, WRONG[arguments].format(**paths), capsys)
    assert sorted(tmp_path.iterdir()) == before


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    log: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **settings: Any) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "run.html"
    path.write_text("an old one")
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["report", log]) == 2
    assert capsys.readouterr().err == f"fastclip: cannot write '{path}': No space left on device\n"
    assert path.read_text() == "an old one"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """An environment in which some packages are not there."""

    def environment(*packages: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("without")
        for name in packages:
            text = f"""raise ModuleNotFoundError("No module named {name!r}", name="{name}")\n"""
            (folder / f"{name}.py").write_text(text)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path}

    return environment


def report(log: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastclip", "report", log, "--json"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_works_where_there_is_no_torch(log: str, without: Callable[..., dict[str, str]]) -> None:
    done = report(log, without("torch", "numpy"))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["records"] == 100


def test_without_plotly_it_says_what_to_install(
    log: str, without: Callable[..., dict[str, str]]
) -> None:
    done = report(log, without("plotly"))
    text = "fastclip: a report needs plotly: pip install 'torch-fastclip[report]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


PEAK = """
import sys, time
from fastclip.cli import main
status = main(["report", sys.argv[1]])
lines = open("/proc/self/status").read().splitlines()
peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
print(status, int(peak) / 1024, time.process_time())
"""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_long_log_takes_bounded_memory(tmp_path: Path) -> None:
    """Every hundredth record has layers, every thousandth a spike, and at last all is NaN."""
    base, count = healthy(5000), 20_000
    log = tmp_path / "long.jsonl"
    with log.open("wb") as file:
        for step in range(count):
            record = changed(
                base[step % 5000 : step % 5000 + 1],
                ([0], "step", step),
                (
                    [0],
                    "loss",
                    float("nan") if step > 0.7 * count else 9.0 if step % 1000 == 999 else 2.0,
                ),
                ([0], "layers", layers(step % 50) if step % 100 == 0 else None),
            )[0]
            file.write(encode(record))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(log)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    status, megabytes, seconds = map(float, done.stdout.splitlines()[-1].split())
    assert status == 0
    assert megabytes < 150
    if sys.gettrace() is None:
        assert seconds / count < 150e-6
    page = tmp_path / "long.html"
    assert page.stat().st_size < 5_000_000
    text = plain(page.read_text(encoding="utf-8"))
    assert "Worst loss 9 at step 999; not finite in 5,999 records, first at step 14001" in text
