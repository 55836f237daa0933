"""The CSVs under results/: one row a measurement, read without torch."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = dict[str, str]

RESULTS = Path(__file__).parent / "results"


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """All rows have the fields of the first. Floats are written with four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(row: Row, name: str) -> float:
    """A field that has to be there. Raises `ValueError` naming the field if it is empty."""
    if not row[name]:
        raise ValueError(f"the field {name!r} is empty in {row}")
    return float(row[name])


def clips(row: Row) -> bool:
    """The field of that name, which Python has written."""
    return {"True": True, "False": False}[row["clips"]]


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
