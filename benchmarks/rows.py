"""All rows of the table."""

from benchmarks import overlap, rules
from fastclip.benchmarking import clipper, functions

ROWS = [*functions.ROWS, *clipper.ROWS, *rules.ROWS, *overlap.ROWS]
