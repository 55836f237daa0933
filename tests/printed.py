"""What examples in the documentation print, against what is shown there."""

import re

import pytest

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


def assert_alike(printed: str, shown: str) -> None:
    """Word by word; numbers up to 1 %, for their last digits are the machine's."""
    lines, expected_lines = printed.splitlines(), shown.splitlines()
    assert len(lines) == len(expected_lines), printed
    for line, expected in zip(lines, expected_lines, strict=True):
        assert words(line) == words(expected)
        assert numbers(line) == pytest.approx(numbers(expected), rel=0.01), (line, expected)


def words(line: str) -> list[str]:
    """What is not a number, with marks for those."""
    return _NUMBER.sub("#", line).split()


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(line)]
