"""The benchmark of the sinks runs, and leaves the environment as it was."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from benchmarks import sinks
from benchmarks.records import number, read


@pytest.fixture(autouse=True)
def _service_ends() -> Iterator[None]:
    yield
    wandb.teardown()


def test_every_sink_has_its_rows(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert sinks.main(["--quick", "--csv", str(tmp_path / "sinks.csv")]) == 0
    assert dict(os.environ) == before
    rows = read(tmp_path / "sinks.csv")
    pairs = [(row["sink"], row["record"]) for row in rows]
    assert pairs == [(name, kind) for name in sinks.sinks() for kind in sinks.COUNTS]
    assert all(0 < number(row, "us") <= number(row, "us_worst") for row in rows)
