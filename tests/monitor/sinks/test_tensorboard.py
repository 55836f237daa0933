"""TensorBoard: event files are read back by its own two readers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastclip.monitor import StepRecord, TensorBoard
from tests.monitor.sinks.making import LAYERS, expected, same, write

FIELDS = ("loss", "grad_norm", "lr", "clipped", "attempt")


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    events = read(folder)
    known = name in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars(name)] if known else []


# What the page is given: TensorBoard's data server reads the folder. It ends with this process.
SERVED = """
import json, sys, time
from tensorboard.context import RequestContext
from tensorboard.data.server_ingester import SubprocessServerDataIngester, get_server_binary
from tensorboard.util.grpc_util import ChannelCredsType
server = SubprocessServerDataIngester(
    get_server_binary(),
    sys.argv[1],
    reload_interval=1,
    channel_creds_type=ChannelCredsType.LOCAL,
    samples_per_plugin={"scalars": 1 << 30},
)
server.start()
found, end = {}, time.monotonic() + 20
while len(found) < 2 and time.monotonic() < end:  # it reads while it serves
    found = server.data_provider.read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=1 << 30
    )
losses = {run: [point.step for point in tags["fastclip/loss"]] for run, tags in found.items()}
print(json.dumps(losses))
"""


def test_all_of_it_is_read_back(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "run")
    write(sink)
    sink.close()
    folders = [tmp_path / "run", tmp_path / "run/attempt-1"]
    for name in FIELDS:
        found = [
            (attempt, *point)
            for attempt, folder in enumerate(folders)
            for point in points(folder, f"fastclip/{name}")
        ]
        assert same(found, expected(name)), name
    for place, layer in enumerate(LAYERS):
        start = f"fastclip/layers/{layer}"
        assert points(folders[0], f"{start}/norm") == [(3, place + 0.5)]
        assert points(folders[0], f"{start}/nonfinite") == [(3, 0.25)]
        assert same(points(folders[0], f"{start}/max_abs"), [(3, float("nan"))])
        assert points(folders[0], f"{start}/param_norm") == []


def test_events_are_counts_and_text(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    write(sink)
    sink.close()
    assert points(tmp_path, "fastclip/events/critical") == [(2, 1.0)]
    assert points(tmp_path, "fastclip/events/warn") == [(4, 2.0)]
    first, second = read(tmp_path).Tensors("fastclip/events")
    assert (first.step, second.step) == (2, 4)
    text = [event.tensor_proto.string_val[0].decode() for event in (first, second)]
    assert text[0] == "    step 2 (onset 1): critical: nonfinite, loss is nan"
    assert text[1].split("\n") == [
        "    step 4: warn: spike, loss [bold]__is__[/bold] 2",
        "    step 4: warn: spike, grad_norm [bold]__is__[/bold] 2",
    ]


def test_the_page_shows_both_attempts(tmp_path: Path) -> None:
    """Its server hides the points of a run that lie at or after a step that comes again."""
    sink = TensorBoard(tmp_path)
    write(sink)
    sink.close()
    command = [sys.executable, "-c", SERVED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == {".": [0, 1, 2, 3, 4], "attempt-1": [3, 4, 5, 6, 7]}


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    for step in range(4):
        sink = TensorBoard(tmp_path, prefix="opt", layers=False)
        sink.write(StepRecord(step, float(step)), [])
        sink.close()
        sink.close()
    # Files of one second are read by the number of their writer in this process, 10 before 9.
    assert sorted(points(tmp_path, "opt/loss")) == [(step, float(step)) for step in range(4)]


def test_one_sink_may_be_closed_and_go_on(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for step in range(3):
        sink.write(StepRecord(step, float(step)), [])
        sink.close()
    assert points(tmp_path, "fastclip/loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_number_too_large_for_it_is_infinite(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(StepRecord(0, 1e300, grad_norm=0.1), [])
    sink.close()
    assert points(tmp_path, "fastclip/loss") == [(0, float("inf"))]
    [(_, norm)] = points(tmp_path, "fastclip/grad_norm")
    assert norm == pytest.approx(0.1, rel=2**-24)


WITHOUT_CLOSE = """
import sys
from fastclip.monitor import StepRecord, TensorBoard
sink = TensorBoard(sys.argv[1])
for step in range(50):
    sink.write(StepRecord(step, 1.0), [])
assert "torch" not in sys.modules
"""


def test_a_process_that_ends_without_close_has_written_all(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_CLOSE, str(tmp_path)], check=True, timeout=60)
    assert [step for step, _ in points(tmp_path, "fastclip/loss")] == list(range(50))


FULL = """
import resource, sys, time
from fastclip.monitor import Event, StepRecord, TensorBoard
sink = TensorBoard(sys.argv[1])
sink.write(StepRecord(0, 1.0), [])
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
event = Event(1, "spike", "warn", "loss", 1.0)
for step in range(1, 20):
    try:
        sink.write(StepRecord(step, 1.0), [event])
    except OSError as error:
        print(step, error, flush=True)
try:
    sink.close()
except OSError as error:
    print(20, error, flush=True)
"""

FULL_AT_THE_END = """
import contextlib, os, resource, sys
from fastclip.monitor import Event, StepRecord, TensorBoard
sink = TensorBoard(sys.argv[1])
sink.write(StepRecord(0, 1.0), [Event(0, "spike", "warn", "loss", 1.0)])  # is on the disk
[file] = os.scandir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size,) * 2)
with contextlib.suppress(OSError):
    sink.write(StepRecord(1, 1.0), [])  # raises if the thread is that fast
try:
    sink.close()
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_of_write(tmp_path: Path) -> None:
    """Of that write, of every one after it, and of close; nothing hangs."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    failed = done.stdout.splitlines()
    first = int(failed[0].split()[0])
    assert first < 19
    assert [int(line.split()[0]) for line in failed] == list(range(first, 21))
    assert all("File too large" in line for line in failed)


def test_what_close_could_not_write_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_AT_THE_END, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[Errno 27] File too large\n"
