"""Two runs side by side: which ratios moved by more than their spread.

    python -m benchmarks.compare OLD.csv NEW.csv

Absolute times are not compared: they belong to a machine and a day. A ratio has moved when the
ranges from the 20th to the 80th percentile of the two runs do not meet.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONDITIONS = ("cpu", "threads", "backend", "kernels")


@dataclass(frozen=True)
class Ratio:
    """A side's ratio to its baseline, with the 20th and the 80th percentile."""

    baseline: str
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


Ratios = dict[tuple[str, str], Ratio]


def ratios(rows: Iterable[Mapping[str, object]]) -> Ratios:
    """By name of the row and side; of gaps and of rows about memory there is none."""
    found = {}
    for row in rows:
        if row.get("ratio") in (None, ""):
            continue
        values = (float(str(row[key])) for key in ("ratio_p20", "ratio", "ratio_p80"))
        if row["side"] != row["baseline"]:
            found[str(row["name"]), str(row["side"])] = Ratio(str(row["baseline"]), *values)
    return found


def moved(old: Ratios, new: Ratios) -> list[str]:
    """One line for each ratio in both runs that moved, the largest change first."""
    lines = []
    for key in old.keys() & new.keys():
        before, after = old[key], new[key]
        if before.low <= after.high and after.low <= before.high:
            continue
        change = after.median / before.median
        baseline = before.baseline
        if after.baseline != baseline:
            baseline = f"{baseline}, now {after.baseline}"
        text = f"{key[0]}, {key[1]}: {before} to {after} times {baseline}"
        lines.append((max(change, 1 / change), text))
    return [text for _, text in sorted(lines, reverse=True)]


def report(path: Path, rows: list[dict[str, object]]) -> str:
    """What moved between the run in a CSV and these rows, as text for people."""
    if not path.exists():
        return f"nothing to compare with: there is no {path}"
    with path.open(newline="") as file:
        before = list(csv.DictReader(file))
    if not before or "side" not in before[0]:
        return f"nothing to compare with: {path} is not a run of this suite"
    if not rows:
        return "nothing to compare: no row was measured"
    old, new = ratios(before), ratios(rows)
    both = len(old.keys() & new.keys())
    lines = moved(old, new)
    about = {key: (before[0].get(key), rows[0].get(key)) for key in CONDITIONS if key in rows[0]}
    differ = [f"{key}: {a}, now {b}" for key, (a, b) in about.items() if str(a) != str(b)]
    text = f"{len(lines)} of {both} ratios moved by more than their spread"
    return "\n".join([*differ, text, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    with args.new.open(newline="") as file:
        print(report(args.old, [dict(row) for row in csv.DictReader(file)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
