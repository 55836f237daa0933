"""Progress of long commands: a line that is rewritten on a terminal, plain lines elsewhere."""

import io

import pytest

from fastclip.commands.progress_bar import ERASE, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("fastclip.commands.progress_bar.time.monotonic", lambda: now[0])
    return now


def test_elsewhere_each_part_is_a_line() -> None:
    stream = io.StringIO()
    parts = Progress(2, stream)
    parts.begin("first")
    parts.clear()
    parts.begin("second")
    assert stream.getvalue() == "[1/2] first\n[2/2] second\n"


def test_on_a_terminal_one_line_is_rewritten(clock: list[float]) -> None:
    stream = Terminal()
    parts = Progress(4, stream)
    parts.begin("first")
    clock[0] += 10
    parts.begin("second")
    clock[0] += 110
    parts.begin("third")
    parts.clear()
    assert stream.getvalue().split(ERASE) == [
        "",
        "[--------------------] 0/4  first",
        "[#####---------------] 1/4, 30 s left  second",
        "[##########----------] 2/4, 2 min left  third",
        "",
    ]


def test_the_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    Progress(1, stream).begin("a name that is far too long")
    assert len(stream.getvalue().removeprefix(ERASE)) == 29  # one more would wrap
