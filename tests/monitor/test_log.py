"""The log: what is written is read again, whatever the last process did to the file."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import JSONL, LayerRow, Monitor, StepRecord
from fastclip.monitor import log as log_module
from fastclip.monitor.log import decode, encode
from fastclip.monitor.records import METRICS
from tests.monitor.making import healthy

NAN, INF = math.nan, math.inf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def write(path: Path, *records: StepRecord) -> None:
    log = JSONL(path)
    for record in records:
        log.write(record, [])


def steps(path: Path) -> list[int]:
    return [record.step for record in JSONL(path)]


floats = st.none() | st.floats()
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
rows = st.builds(LayerRow, st.text(), floats, floats, floats, floats, floats)
all_records = st.builds(
    StepRecord,
    step=st.integers(),
    **{**dict.fromkeys(METRICS, floats), "nonfinite_count": st.none() | st.integers(0, 10**12)},
    **dict.fromkeys(("clipped", "skipped"), st.none() | st.booleans()),
    batch=plain,
    attempt=st.integers(0, 9),
    layers=st.none() | st.lists(rows, max_size=3).map(tuple),
)


@settings(max_examples=40)
@given(all_records)
def test_records_survive_bit_for_bit(record: StepRecord) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert repr(decode(line)) == repr(record)  # repr tells -0.0 from 0.0 and finds NaN equal
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_line_by_hand(path: Path) -> None:
    layers = (LayerRow("w", 0.5, INF), LayerRow("b"))
    write(path, StepRecord(3, NAN, grad_norm=INF, lr=-INF, clipped=False, batch=7, layers=layers))
    assert path.read_bytes() == (
        b'{"step":3,"loss":"nan","grad_norm":"inf","clipped":false,"lr":"-inf","batch":7,'
        b'"attempt":0,"layers":[{"name":"w","norm":0.5,"max_abs":"inf"},{"name":"b"}]}\n'
    )


def test_other_hands_write_json_too(path: Path) -> None:
    """Unknown keys, bare NaN, whole numbers as floats, blank lines, Windows line ends."""
    path.write_bytes(
        b'{"step": 1.0, "loss": NaN, "epoch": 2, "nonfinite_count": 3.0}\r\n\n  \n'
        b'{"loss": 2, "step": 2, "clipped": 1, "lr": null}'
    )
    first, second = JSONL(path)
    assert (first.step, str(first.loss), first.nonfinite_count) == (1, "nan", 3)
    assert second == StepRecord(2, 2.0, clipped=True)
    assert type(second.loss) is float


BAD_LINES = {
    b"nonsense": "Expecting value",
    b'{"step": 1, "loss"': "Expecting ':' delimiter",
    b"[1, 2]": "it is a list, not an object",
    b"7": "it is a int, not an object",
    b'{"loss": 1.0}': "a record needs a step",
    b'{"step": null, "loss": 1.0}': "a record needs a step",
    b'{"step": 1.5}': "step must be a whole number, got 1.5",
    b'{"step": "1"}': "step must be a whole number, got '1'",
    b'{"step": true}': "step must be a whole number, got True",
    b'{"step": "inf"}': "step must be a whole number, got 'inf'",
    b'{"step": 1, "loss": "1.0"}': "loss must be a number, got '1.0'",
    b'{"step": 1, "loss": [1.0]}': r"loss must be a number, got \[1.0\]",
    b'{"step": 1, "loss": true}': "loss must be a number, got True",
    b'{"step": 1, "lr": 1' + b"0" * 400 + b"}": "lr must be a number, got 1000",
    b'{"step": 1, "clipped": 2}': "clipped must be true or false, got 2",
    b'{"step": 1, "skipped": "nan"}': "skipped must be true or false, got 'nan'",
    b'{"step": 1, "nonfinite_count": -1}': "nonfinite_count must be a whole number of at least 0",
    b'{"step": 1, "attempt": -1}': "attempt must be a whole number of at least 0, got -1",
    b'{"step": 1, "layers": [{"norm": 1}]}': "layers must be a sequence of LayerRow",
    b'{"step": 1, "layers": 3}': "layers must be a sequence of LayerRow, got 3",
    b'\xff{"step": 1}': "can't decode byte 0xff",
    b"\0\0\0\0": "Expecting value",
    b"[" * 100_000: "recursion",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: ascii(line[:40]))
def test_a_line_that_is_no_record_is_told_and_skipped(path: Path, line: bytes) -> None:
    path.write_bytes(b'{"step":0}\n\n' + line + b'\n{"step":9}\n')
    with pytest.warns(UserWarning, match=rf"run.jsonl, line 3: .*{BAD_LINES[line]}") as warned:
        assert steps(path) == [0, 9]
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_reading_touches_nothing(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(JSONL(path))
    assert JSONL(path).last() is None
    assert not path.exists()
    path.write_bytes(b'{"step":1}')
    assert steps(path) == [1]
    assert JSONL(path).last() == StepRecord(1)
    assert path.read_bytes() == b'{"step":1}'


def test_a_record_is_there_when_write_returns(path: Path) -> None:
    log = JSONL(path)
    for step in range(3):
        log.write(StepRecord(step), [])
        assert steps(path) == list(range(step + 1))


def test_an_existing_log_is_added_to(path: Path) -> None:
    write(path, StepRecord(0), StepRecord(1))
    before = path.read_bytes()
    write(path, StepRecord(2))
    assert path.read_bytes() == before + b'{"step":2,"attempt":0}\n'


def test_a_log_torn_at_any_byte_loses_that_line_alone(path: Path) -> None:
    whole = encode(StepRecord(0, 1.5)) + encode(StepRecord(1, 2.5, grad_norm=0.5))
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole) + 1):
        path.write_bytes(whole[:end])
        write(path, StepRecord(5))
        assert path.read_bytes()[:end] == whole[:end]
        if start < end < len(whole) - 1:  # without its newline alone a line is still a record
            with pytest.warns(UserWarning, match="line 2: skipped"):
                assert steps(path) == [0, 5]
        else:
            assert steps(path) == ([0, 5] if end == start else [0, 1, 5])


def test_a_disk_that_was_full_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write_all = JSONL(path), os.write
    log.write(StepRecord(0), [])

    def full(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write_all(file, data[:-9])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.write(StepRecord(1), [])
    monkeypatch.undo()
    log.write(StepRecord(2), [])
    with pytest.warns(UserWarning, match="line 2: skipped"):
        assert steps(path) == [0, 2]


@pytest.mark.parametrize("garbage", [b"", b"{torn", b"\n\n\n", b"x" * 200_000, b"{}\n" * 30_000])
def test_last_is_the_last_record(path: Path, garbage: bytes) -> None:
    layers = tuple(LayerRow(f"layer.{i}", 1.0) for i in range(9_000))  # longer than one look
    records = [StepRecord(0), StepRecord(7, 2.0, attempt=3, layers=layers)]
    write(path, *records)
    with path.open("ab") as file:
        file.write(garbage)
    assert JSONL(path).last() == records[1]
    path.write_bytes(garbage)
    assert JSONL(path).last() is None


def test_last_is_no_part_of_a_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b'{"step":1}\n' + b"x" * 30 + b'{"step":5}\n')
    monkeypatch.setattr(log_module, "TAIL", 11)
    assert JSONL(path).last() == StepRecord(1)


WRITER = """
import sys
from fastclip.monitor import JSONL, LayerRow, Monitor, StepRecord
log = JSONL(sys.argv[1])
monitor = Monitor([], [log])
layers = tuple(LayerRow(f"layer.{i}", 0.1 * i, 1.0 / (i + 1)) for i in range(400))
for step in range(10**9):
    monitor.observe(step=step, loss=1.0 + step, layers=layers if step % 2 else None)
    print(step, flush=True)
"""


def test_a_kill_loses_nothing_that_was_written(path: Path) -> None:
    """Killed at some point, five times over; each process goes on with the same log."""
    for attempt in range(5):
        command = [sys.executable, "-c", WRITER, str(path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child:
            child.stdout.readline()
            time.sleep(0.003 + 0.0071 * attempt)
            child.send_signal(signal.SIGKILL)
            acknowledged = [int(line) for line in child.stdout.read().split("\n")[:-1]]
        with warnings.catch_warnings(record=True) as torn:
            warnings.simplefilter("always")
            found = [record for record in JSONL(path) if record.attempt == attempt]
        assert len(torn) <= attempt + 1  # a kill may cut the write that is going on
        assert [record.step for record in found] == list(range(len(found)))
        assert len(found) > max(acknowledged, default=0)
        assert [record.loss for record in found] == [1.0 + i for i in range(len(found))]
        assert all((record.layers is not None) == bool(record.step % 2) for record in found)


def test_two_processes_may_add_to_one_log(path: Path) -> None:
    first, second = JSONL(path), JSONL(path)
    for step in range(50):
        (first if step % 3 else second).write(StepRecord(step), [])
    assert steps(path) == list(range(50))


def test_replay_takes_a_path_a_log_and_records(path: Path) -> None:
    records = healthy(300)
    records[250] = replace(records[250], loss=9.0)
    write(path, *records)
    logs: list[Any] = [path, str(path), JSONL(path), records, iter(records)]
    events = [Monitor().replay(log) for log in logs]
    assert events == [events[0]] * 5
    assert {event.step for event in events[0]} == {250}
