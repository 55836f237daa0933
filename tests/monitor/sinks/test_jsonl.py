"""The log under attack: nothing is lost but what never was whole."""

import copy
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from fastclip.monitor import JSONL, LayerRow, StepRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def steps(path: Path) -> list[int]:
    return [record.step for record in JSONL(path)]


def write(log: JSONL, *steps: int) -> None:
    for step in steps:
        log.write(StepRecord(step), [])


def test_a_log_that_is_deleted_goes_on_in_a_new_file(path: Path) -> None:
    log = JSONL(path)
    write(log, 0)
    path.unlink()
    with pytest.warns(UserWarning, match="run.jsonl was deleted or moved away") as warned:
        write(log, 1)
    assert warned[0].filename == __file__
    write(log, 2)
    assert steps(path) == [1, 2]


def test_a_log_that_is_rotated_goes_on_in_a_new_file(path: Path) -> None:
    log = JSONL(path)
    write(log, 0, 1)
    moved = path.rename(path.with_suffix(".1"))
    path.write_bytes(b'{"step":7}\n')  # another was put in its place
    with pytest.warns(UserWarning, match="deleted or moved away"):
        write(log, 2)
    write(log, 3)
    assert steps(moved) == [0, 1]
    assert steps(path) == [7, 2, 3]


def test_a_log_that_is_emptied_goes_on_from_its_start(path: Path) -> None:
    log = JSONL(path)
    write(log, 0)
    os.truncate(path, 0)
    write(log, 1)
    assert path.read_bytes() == b'{"step":1,"attempt":0}\n'


def test_the_warning_as_an_error_loses_no_record(path: Path) -> None:
    log = JSONL(path)
    write(log, 0)
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            write(log, 1)
    assert steps(path) == [1]


def test_a_line_torn_by_another_writer_costs_that_line_alone(path: Path) -> None:
    first, second = JSONL(path), JSONL(path)
    write(first, 0)
    write(second, 1)
    with path.open("ab") as killed:
        killed.write(b'{"step":2,"lo')
    write(first, 3)
    write(second, 4)
    with pytest.warns(UserWarning, match="line 3: skipped"):
        assert steps(path) == [0, 1, 3, 4]


def test_a_program_may_change_its_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    log = JSONL(path.name)
    (path.parent / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    write(log, 0)
    assert steps(path) == [0]
    assert log.last() == StepRecord(0)
    assert list(log) == [StepRecord(0)]


def test_copies_open_the_file_for_themselves(path: Path) -> None:
    """A number of an open file would be that of another file elsewhere, or later."""
    log = JSONL(path)
    write(log, 0)
    copies = [copy.copy(log), copy.deepcopy(log), pickle.loads(pickle.dumps(log))]
    del log
    with path.with_name("innocent").open("wb") as innocent:  # which now has the number
        for step, other in enumerate(copies, 1):
            write(other, step)
    assert Path(innocent.name).read_bytes() == b""
    assert steps(path) == [0, 1, 2, 3]


def test_closing_and_going_on(path: Path) -> None:
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir())) if opened.exists() else 0
    with JSONL(path) as log:
        write(log, 0)
    log.close()
    if before:
        assert len(list(opened.iterdir())) == before
    write(log, 1)
    assert steps(path) == [0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_adds_to_the_same_log(path: Path) -> None:
    script = f"""
import os
from fastclip.monitor import JSONL, StepRecord
log = JSONL({str(path)!r})
log.write(StepRecord(0), [])
if os.fork() == 0:
    log.write(StepRecord(1), [])
    log.close()
else:
    os.wait()
    log.write(StepRecord(2), [])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert steps(path) == [0, 1, 2]


def test_threads_do_not_cut_each_others_lines(path: Path) -> None:
    layers = tuple(LayerRow(f"layer.{i}", 0.1 * i) for i in range(300))  # several pages a line
    log = JSONL(path)

    def add(first: int) -> None:
        for step in range(first, first + 50):
            log.write(StepRecord(step, layers=layers), [])

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list(JSONL(path))
    assert sorted(record.step for record in found) == [
        first + n for first in (0, 1000, 2000) for n in range(50)
    ]
    assert all(record.layers == layers for record in found)


def test_a_limit_of_the_file_size_is_an_error_and_not_the_end(path: Path) -> None:
    """As a full disk: a part of a line is written, then nothing; later there is room again."""
    script = f"""
import resource
from fastclip.monitor import JSONL, StepRecord
log = JSONL({str(path)!r})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
for step in range(9):
    try:
        log.write(StepRecord(step, 1.5), [])
    except OSError as error:
        print(step, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.write(StepRecord(9), [])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"{step} [Errno 27] File too large" for step in (5, 6, 7, 8)
    ]
    with pytest.warns(UserWarning, match="line 6: skipped"):
        assert steps(path) == [0, 1, 2, 3, 4, 9]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_that_is_full_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write(JSONL("/dev/full"), 0)


def test_nothing_is_written_of_what_json_has_not(path: Path) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    log = JSONL(path)
    for batch in ({1, 2}, deep, 10**5000):
        with pytest.raises((TypeError, RecursionError, ValueError)):
            log.write(StepRecord(1, batch=batch), [])
    write(log, 2)
    assert steps(path) == [2]


ODD = {
    "a mark of byte order": (b'\xef\xbb\xbf{"step":0}\r\n{"step":1}\r\n', [0, 1], 0),
    "a key twice": (b'{"step":7,"step":0}\n', [0], 0),
    "a number beyond floats": (b'{"step":0,"loss":1e999}\n', [0], 0),
    "a long fraction": (b'{"step":0,"loss":0.' + b"3" * 9000 + b"}\n", [0], 0),
    "a long whole number": (b'{"step":' + b"1" * 9000 + b'}\n{"step":1}\n', [1], 1),
    "pages of zeros": (b'{"step":0}\n' + b"\0" * 8192 + b'\n{"step":1}\n', [0, 1], 1),
    "zeros at the end": (b'{"step":0}\n' + b"\0" * 8192, [0], 1),
    "old line ends": (b'{"step":0}\r{"step":1}\r', [], 1),
    "a line of megabytes": (b'{"step":0,"batch":"' + b"x" * 5_000_000 + b'"}\n', [0], 0),
    "another encoding": ('{"step":0}\n'.encode("utf-16"), [], 2),
}


@pytest.mark.parametrize("name", ODD)
def test_a_file_that_others_made(path: Path, name: str) -> None:
    """Lines that are records are read, others are told, and a new record is not harmed."""
    data, found, skipped = ODD[name]
    path.write_bytes(data)
    write(JSONL(path), 99)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert steps(path) == [*found, 99]
    assert len(warned) == skipped
    assert JSONL(path).last() == StepRecord(99)


def test_a_path_of_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a b\n'\"[x]*\N{SNOWMAN}"
    folder.mkdir()
    path = folder / os.fsdecode(b"run\xff.jsonl")
    write(JSONL(path), 0)
    with path.open("ab") as file:
        file.write(b"torn")
    with pytest.warns(UserWarning, match="line 2: skipped"):
        assert steps(path) == [0]
