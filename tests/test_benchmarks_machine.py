"""What the benchmark says of the machine: whether it is idle, and what its memory holds."""

import pytest

from benchmarks import cpu
from fastclip.benchmarking import machine
from fastclip.benchmarking.machine import Idleness


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        (Idleness(0.0, 0.02, 25.0), None),
        (Idleness(9.0, None, 25.0), None),
        (Idleness(0.0, 1.0, 25.0), "1.00 cores busy"),
        (Idleness(0.0, None, 8000.0), "8000 us"),
    ],
)
def test_only_a_busy_machine_is_complained_about(idle: Idleness, words: str | None) -> None:
    complaint = idle.complaint()
    assert (complaint is None) == (words is None)
    assert words is None or words in str(complaint)


def test_a_row_that_memory_does_not_hold_is_left_out_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    assert cpu.main(["--quick", "--filter", "resnet50-float32"]) == 0
    printed = capsys.readouterr().out
    assert "resnet50-float32-clipped: left out, it needs 0.0 GiB of 0.0 available" in printed
    assert "a rival was" not in printed
