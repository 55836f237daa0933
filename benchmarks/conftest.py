"""Options of the suite, and the recording that its tests replay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.recording import Recording
from fastclip.benchmarking import report

RUN = pytest.StashKey[report.Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastclip's suite")
    group.addoption("--small", action="store_true", help="small sizes: does everything run?")
    group.addoption("--every", action="store_true", help="also the lists that take long")
    group.addoption("--threads", type=int, default=2, metavar="N", help="default 2")
    group.addoption("--seconds", type=float, default=780, help="then no further row is begun")
    group.addoption("--csv", type=Path, metavar="PATH", help="also write one row a side")
    group.addoption("--against", type=Path, metavar="CSV", help="compare ratios with this run")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """The table is what is printed as the rows come: no letters between its lines. A test counts
    once: setting up and tearing down are no tests that passed."""
    if report.failed:
        return None
    counts = report.when == "call" or report.skipped
    return (report.outcome if counts else "", "", "")


@pytest.fixture(scope="session")
def recording(pytestconfig: pytest.Config) -> Iterator[Recording]:
    terminal: Any = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    capture: Any = pytestconfig.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(text, flush=True)

    option = pytestconfig.getoption
    recording = Recording(
        say, quick=option("--small"), threads=option("--threads"), seconds=option("--seconds")
    )
    yield recording
    run = recording.finish()
    pytestconfig.stash[RUN] = run
    path = option("--csv")
    if path is not None and run.results:  # an empty run must not replace one
        path.parent.mkdir(parents=True, exist_ok=True)
        report.write_csv(path, run)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--against")
    if path is None or RUN not in config.stash:
        return
    terminalreporter.section(f"ratios against {path}")
    rows = [row for result in config.stash[RUN].results for row in report.records(result)]
    terminalreporter.write_line(compare.report(path, rows))
