"""The console: what is on the screen, as text; a terminal is one of rich's own making."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console

from fastclip.monitor import Console, Event, StepRecord
from tests.monitor.sinks.making import NONFINITE, SPIKES, write

SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


def plain(width: int = 200) -> tuple[rich.console.Console, io.StringIO]:
    out = io.StringIO()
    return rich.console.Console(file=out, width=width), out


def terminal(width: int = 100) -> tuple[rich.console.Console, io.StringIO]:
    out = io.StringIO()
    made = rich.console.Console(file=out, width=width, force_terminal=True, color_system="standard")
    return made, out


def last_picture(text: str) -> list[str]:
    """The lines of the last drawing, without colours."""
    drawn = re.split(r"\x1b\[2K", text)[-1] if "\x1b[2K" in text else text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).splitlines()


def test_elsewhere_than_on_a_terminal_lines_are_plain() -> None:
    console, out = plain()
    sink = Console(every=4, console=console)
    write(sink)
    sink.close()
    assert out.getvalue().splitlines() == [
        "step 0  loss 0  clipped 100% of 1",
        "step 2 (onset 1): critical: nonfinite, loss is nan",
        "step 4  loss 1  grad norm inf  clipped 60% of 5  lr -inf",
        "step 4: warn: spike, loss [bold]__is__[/bold] 2",
        "step 4: warn: spike, grad_norm [bold]__is__[/bold] 2",
        "step 5  loss 9.25  clipped 50% of 8  attempt 1",
    ]


def test_a_line_has_what_the_record_has() -> None:
    console, out = plain()
    full = StepRecord(
        1200, 2.34567, 2.5, 0.123456, clipped=True, lr=3e-4, loss_scale=65536.0, skipped=True
    )
    for record in (full, StepRecord(1201)):
        Console(console=console).write(record, [])
    assert out.getvalue().splitlines() == [
        "step 1200  loss 2.346  val loss 2.5  grad norm 0.1235  clipped 100% of 1  lr 0.0003  "
        "scale 65536  skipped",
        "step 1201",
    ]


def test_the_clip_rate_is_over_the_last_hundred() -> None:
    console, out = plain()
    sink = Console(every=250, console=console)
    for step in range(251):
        sink.write(StepRecord(step, clipped=step < 175), [])
    assert out.getvalue().splitlines()[-1] == "step 250  clipped 24% of 100"


def test_what_repeats_itself_is_counted() -> None:
    """An event is new where there was none like it in ten records."""
    console, out = plain()
    sink = Console(every=30, console=console)
    for step in range(61):
        again = step in (*range(5, 16), 25, 36)
        sink.write(StepRecord(step), [Event(step, "spike", "warn", "loss", 1.0)] if again else [])
    assert out.getvalue().splitlines() == [
        "step 0",
        "step 5: warn: spike, loss",
        "step 30  (11 more events like those before)",
        "step 36: warn: spike, loss",
        "step 60",
    ]


def test_a_terminal_has_one_live_line_and_the_last_events() -> None:
    console, out = terminal()
    sink = Console(events=2, console=console)
    sink.write(StepRecord(1, 2.0), [NONFINITE])
    for step in range(2, 50):
        sink.write(StepRecord(step, float(step), attempt=1), SPIKES if step == 49 else [])
    sink.close()
    sink.close()
    text = out.getvalue()
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index("loss") < text.index(SHOW)
    assert last_picture(text) == [
        "step 49  loss 49  attempt 1",
        "step 4: warn: spike, loss [bold]__is__[/bold] 2",
        "step 4: warn: spike, grad_norm [bold]__is__[/bold] 2",
    ]
    assert "\x1b[1;31mstep 2 (onset 1): critical: nonfinite, loss is nan\x1b[0m" in text
    assert "\x1b[33mstep 4: warn" in text


def test_drawing_is_seldom_and_the_last_record_is_shown() -> None:
    console, out = terminal()
    sink = Console(console=console)
    for step in range(5000):
        sink.write(StepRecord(step), [])
    drawn = out.getvalue().count("step ")
    assert drawn < 1000
    sink.close()
    assert last_picture(out.getvalue()) == ["step 4999"]


def test_a_long_event_takes_one_line() -> None:
    console, out = terminal(width=40)
    sink = Console(console=console)
    sink.write(StepRecord(3), [Event(3, "spike", "warn", "loss", 1.0, message="long " * 50)])
    sink.close()
    lines = last_picture(out.getvalue())
    assert [len(line) for line in lines] == [6, 40]
    assert lines[1].endswith("\N{HORIZONTAL ELLIPSIS}")


def test_a_message_cannot_give_orders_to_the_terminal() -> None:
    console, out = plain()
    message = "[red]layer\x1b[2J\r\n\N{RIGHT-TO-LEFT OVERRIDE}[/] :smile: https://x"
    Console(every=9, console=console).write(
        StepRecord(0), [Event(0, "spike", "info", "loss", 1.0, message=message)]
    )
    safe = "[red]layer\N{REPLACEMENT CHARACTER}[2J" + "\N{REPLACEMENT CHARACTER}" * 3
    line = out.getvalue().splitlines()[1]
    assert line == f"step 0: info: spike, {safe}[/] :smile: https://x"


@pytest.mark.parametrize("name", ["every", "events"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Console(**{name: 0})


PROGRAM = """
import sys
from fastclip.monitor import Console, StepRecord
sink = Console()
for step in range(3):
    sink.write(StepRecord(step, 1.0), [])
    print("program", step)
raise RuntimeError("crash")
"""


def test_a_program_that_crashes_gives_the_terminal_back(tmp_path: Path) -> None:
    """On a real pseudo-terminal: its own lines are whole, the cursor is there again."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    said = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(leader)
    assert child.wait(timeout=60) == 1
    text = said.decode()
    assert [text.count(f"program {step}\r\n") for step in range(3)] == [1, 1, 1]
    assert "RuntimeError: crash" in text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(SHOW) > text.index("RuntimeError: crash")
    assert last_picture(text) == ["step 2  loss 1"]
