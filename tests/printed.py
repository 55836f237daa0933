"""What examples in the documentation print, against what is shown there."""

import pytest


def assert_alike(printed: str, shown: str) -> None:
    """Word by word; numbers up to 1 %, for their last digits are the machine's."""
    lines, expected_lines = printed.splitlines(), shown.splitlines()
    assert len(lines) == len(expected_lines), printed
    for line, expected in zip(lines, expected_lines, strict=True):
        for word, other in zip(line.split(), expected.split(), strict=True):
            same = word == other or number(word) == pytest.approx(number(other), rel=0.01)
            assert same, (line, expected)


def number(word: str) -> float:
    return float(word.strip(","))
