"""Killed at any moment, a run goes on and ends with the same bits. 200 kills: see killing.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_killed_at_random_moments() -> None:
    """In a process of its own, for it forks."""
    command = [sys.executable, "-m", "tests.monitor.recovery.killing", "--kills", "20"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "each with the bits of the undisturbed one" in done.stdout
