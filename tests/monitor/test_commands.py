"""`fastclip replay` and `fastclip calibrate`: output, faults, exit statuses, and no torch."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastclip.cli import main
from fastclip.commands import logs, replay
from fastclip.monitor import JSONL, Monitor, StepRecord, monitor, suggest_max_norm
from fastclip.monitor.log import records
from tests.monitor.making import changed, healthy, incident_log, mixtral, require_refused, times
from tests.monitor.report.logs import always_clipped

Capture = pytest.CaptureFixture[str]


def saved(path: Path, records: list[StepRecord], garbage: str = "") -> str:
    log = JSONL(path)
    for record in records:
        log.write(record, [])
    with path.open("a") as file:
        file.write(garbage)
    return str(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("log") / "run.jsonl", incident_log())


def answer(capsys: Capture, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_replay_json_has_every_event(log: str, capsys: Capture) -> None:
    found = answer(capsys, "replay", log)
    events = Monitor().replay(log)
    assert [one["value"] for one in found["events"] if one["step"] == 500] == ["nan"]
    assert list(found) == ["records", "skipped_lines", "events"]
    assert (found["records"], found["skipped_lines"], len(found["events"])) == (
        2000,
        0,
        len(events),
    )
    for one, event in zip(found["events"], events, strict=True):
        assert list(one) == list(vars(event))
        one["value"] = float(one["value"])  # "nan" and "inf" too
        assert repr(one) == repr({**vars(event), "value": float(event.value)})


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_replay_does_not_keep_events(
    form: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "SPOOLED", 1000)
    monkeypatch.setattr(monitor, "KEPT", 50)  # states
    peaks, counts = [], (500, 2000)
    for count in counts:
        bad = (range(100, count), "loss", math.nan)  # an event in each
        path = saved(tmp_path / f"{count}.jsonl", changed(healthy(count), bad))
        with (tmp_path / "out").open("w") as out, contextlib.redirect_stdout(out):
            tracemalloc.start()
            assert main(["replay", path, *form]) == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    text = (tmp_path / "out").read_text()
    if form:
        assert [one["step"] for one in json.loads(text)["events"]] == list(range(100, 2000))
    else:
        assert "1,900 events, 1 incident" in text
    each = (peaks[1] - peaks[0]) / (counts[1] - counts[0])
    assert each < 100, f"{each:.0f} bytes an event"  # one kept takes 300, and 2,700 as JSON


def test_nothing_is_printed_of_a_log_that_cannot_be_read_to_its_end(
    log: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = records

    def failing(*arguments: Any) -> Iterator[StepRecord]:
        yield from itertools.islice(read(*arguments), 1500)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(logs, "records", failing)
    monkeypatch.setattr(replay, "SPOOLED", 100)
    for form in ([], ["--json"]):
        assert main(["replay", log, *form]) == 2
        assert capsys.readouterr() == ("", f"fastclip: cannot read {log!r}: Input/output error\n")


REAL = """\
{path}: 3,094 records, steps 1 to 23405
10 events, 6 incidents

warn      step 2425, onset 2425 (loss): robust_spike
          loss 3.26475 is more than 7 robust standard deviations above the
          median 2.6772 of the 100 values before it

warn      step 3735, onset 3735 (loss): robust_spike
          loss 2.76472 is more than 7 robust standard deviations above the
          median 2.49507 of the 100 values before it

warn      steps 4050 to 4055, 4 events, onset 4050 (loss): spike, robust_spike
          loss 3.84222 is 1.56 times the mean 2.46736 of the 100 values before
          it
"""


def test_replay_tells_the_attempts(tmp_path: Path, capsys: Capture) -> None:
    spiked = changed(healthy(210), ([200], "loss", 30.0))
    again = [replace(record, attempt=1) for record in spiked[150:]]
    assert main(["replay", saved(tmp_path / "run.jsonl", [*spiked, *again])]) == 0
    text = capsys.readouterr().out
    assert "2 incidents" in text
    assert text.count("step 200, onset 200 (loss)") == 1
    assert text.count("step 200, attempt 1, onset 200 (loss)") == 1


def test_replay_text(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "mixtral.jsonl", mixtral())
    assert main(["replay", path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(REAL.format(path=path))
    assert (out.count("onset"), err) == (6, "")
    calm = saved(tmp_path / "calm.jsonl", healthy(200))
    assert main(["replay", calm]) == 0
    assert capsys.readouterr().out == f"{calm}: 200 records, steps 0 to 199\nno events\n"


def test_many_incidents_are_cut(tmp_path: Path, capsys: Capture) -> None:
    spikes = (range(200, 3000, 40), "grad_norm", times(60))
    path = saved(tmp_path / "run.jsonl", changed(healthy(3000), spikes))
    assert main(["replay", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("warn ") for line in lines) == 50
    assert lines[1] == "70 events, 70 incidents"
    assert lines[-1] == "and 20 more; --json gives every event"


def test_a_long_divergence_is_one_incident(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "run.jsonl", changed(healthy(900), (range(500, 900), "loss", math.nan)))
    assert main(["replay", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:] == [
        "critical  steps 500 to 899, 400 events, onset 500 (loss): nonfinite",
        "          loss is nan",
    ]


def test_a_run_that_clips_all_the_time_hides_nothing(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "run.jsonl", always_clipped())
    assert main(["replay", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(" events, 3 incidents")
    assert lines[3:5] == [
        "warn      steps 99 to 399, 301 events, onset 99 (clipped): clip_rate",
        "          100 % of the last 100 steps were clipped",
    ]
    told = [line for line in lines[5:] if line.startswith(("warn", "critical"))]
    assert told == [
        "warn      step 250, onset 250 (loss): spike, robust_spike",
        "critical  step 320, onset 320 (grad_norm): nonfinite",
    ]


def test_skipped_lines_are_told_and_counted(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "run.jsonl", healthy(1000), garbage="nonsense\n" * 25 + '{"step": 1')
    assert main(["replay", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"records": 1000, "skipped_lines": 26, "events": []}
    lines = err.splitlines()
    assert len(lines) == 21
    assert lines[0] == f"{path}, line 1001: skipped, not a record: Expecting value (character 1)"
    assert lines[-1] == "and 6 more"
    assert main(["calibrate", path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: 1,000 records, steps 0 to 999, 26 lines skipped\n")
    assert len(err.splitlines()) == 21


def test_calibrate_is_suggest_max_norm(log: str, capsys: Capture) -> None:
    norms = [record.grad_norm for record in incident_log()]
    expected = suggest_max_norm(norms)._asdict()
    assert answer(capsys, "calibrate", log) == {**expected, "warnings": []}
    expected = suggest_max_norm(norms, 0.2)._asdict()
    assert answer(capsys, "calibrate", "--clip-rate", "0.2", log) == {**expected, "warnings": []}


def test_calibrate_without_warm_up_and_what_was_rolled_back(
    tmp_path: Path, capsys: Capture
) -> None:
    """Norms are 1 to 300, but for a warm-up of 50 steps and for 100 that were run again."""
    first = [StepRecord(i, grad_norm=1e3 if i < 50 or i >= 200 else float(i)) for i in range(300)]
    again = [StepRecord(i, grad_norm=float(i)) for i in range(200, 301)]
    path = saved(tmp_path / "run.jsonl", first + again)
    expected = suggest_max_norm([float(i) for i in range(50, 301)], 0.1)._asdict()
    found = answer(capsys, "calibrate", path, "--clip-rate", "0.1", "--from", "50")
    assert found == {**expected, "warnings": list(expected["warnings"])}
    assert (found["samples"], found["max_norm"]) == (251, 275.0)
    assert answer(capsys, "calibrate", path, "--clip-rate", "0.1")["samples"] == 301


def test_calibrate_text(tmp_path: Path, capsys: Capture) -> None:
    records = [StepRecord(i, grad_norm=float(i)) for i in range(1, 101)]
    path = saved(tmp_path / "run.jsonl", records)
    assert main(["calibrate", path, "--clip-rate", "0.1"]) == 0
    assert capsys.readouterr().out == (
        f"{path}: 100 records, steps 1 to 100\n"
        "max_norm=90 clips 10.00% of 100 steps\n"
        "median norm, second half over first: 2.96\n"
        "warning: the median norm of the second half is 2.96 times that of the first: no fixed "
        "threshold fits both; an adaptive rule such as fastclip.rules.LogZ(halflife=10) follows "
        "the norm\n"
        "\n"
        "    max_norm   clipped\n"
        "          90    10.00%\n"
        "          80    20.00%\n"
        "          50    50.00%\n"
    )


WRONG = {
    "replay": "the following arguments are required: LOG",
    "replay {missing}": "cannot read '{missing}': No such file or directory",
    "replay {folder}": "cannot read '{folder}': Is a directory",
    "replay {empty}": "there are no records in '{empty}'\n",
    "replay {garbage}": "there are no records in '{garbage}': no line of it is a record\n",
    "replay {garbage} --json": "there are no records in '{garbage}': no line of it is a record\n",
    "replay {log} twice": "unrecognized arguments: twice",
    "replay {log} --clip-rate 0.1": "unrecognized arguments: --clip-rate 0.1",
    "calibrate": "the following arguments are required: LOG",
    "calibrate {missing}": "cannot read '{missing}': No such file or directory",
    "calibrate {garbage}": "there are no records in '{garbage}': no line of it is a record\n",
    "calibrate {log} --clip-rate 2": "clip_rate must be a share over 0 and under 1, got 2.0",
    "calibrate {log} --clip-rate nan": "clip_rate must be a share over 0 and under 1, got nan",
    "calibrate {log} --clip-rate x": "argument --clip-rate: invalid float value: 'x'",
    "calibrate {log} --clip-rate": "argument --clip-rate: expected one argument",
    "calibrate {short}": "a clip rate of 0.01 needs at least 1000 gradient norms, got 30: "
    "take --clip-rate 0.4 or more",
    "calibrate {short} --from 30": "a clip rate of 0.01 needs at least 1000 gradient norms, got 0",
    "calibrate {log} --from x": "argument --from: invalid int value: 'x'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_one_line_and_status_2(
    arguments: str, log: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_text("nonsense\n[]\n\n" * 30)
    saved(tmp_path / "short", healthy(30), garbage="torn")
    names = ("missing", "empty", "garbage", "short")
    paths = {name: str(tmp_path / name) for name in names} | {"folder": str(tmp_path), "log": log}
    require_refused(arguments.format(**paths), WRONG[arguments].format(**paths), capsys)


@pytest.mark.parametrize(
    ("command", "counted", "number"), [("replay", "records", 2000), ("calibrate", "samples", 1959)]
)
def test_works_where_there_is_no_torch(
    command: str, counted: str, number: int, log: str, tmp_path: Path
) -> None:
    text = """raise ModuleNotFoundError("No module named 'torch'", name="torch")\n"""
    (tmp_path / "torch.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "fastclip", command, log, "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found[counted] == number


def test_progress_on_a_terminal_alone(
    log: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHECKED", 500)
    monkeypatch.setattr(logs, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["replay", log, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["records"] == 2000
    shown = err.split("\r")
    assert [line.split(" (")[0] for line in shown[1:-1]] == [
        f"{n} lines" for n in ("0", "500", "1,000", "1,500")
    ]
    assert all(line.endswith("%)") for line in shown[1:-1])
    assert shown[-1] == "\x1b[K"
