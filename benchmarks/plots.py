"""`python -m benchmarks.plots`: every picture of docs/performance.md, from CSVs of results/ alone.

Needs matplotlib (the extra ``bench``) and not torch.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import figures, style
from benchmarks.records import RESULTS, read

DOCS = RESULTS.parents[1] / "docs"


class Picture(NamedTuple):
    """A file in docs/, what draws it, and the CSVs it is drawn from, with what writes them."""

    name: str
    draw: Callable[..., Any]
    sources: tuple[str, ...]
    written_by: str


PICTURES: tuple[Picture, ...] = (
    Picture("speed-ratio", figures.ratio, ("suite.csv",), "make bench"),
    Picture("speed-bandwidth", figures.bandwidth, ("scaling.csv",), "make bench-scaling"),
    Picture("speed-host", figures.host, ("scaling.csv",), "make bench-scaling"),
    Picture(
        "speed-training",
        figures.training,
        ("training.csv", "training-curves.csv"),
        "make bench-training",
    ),
)


def of_card(csv: Path) -> tuple[Picture, ...]:
    """The same for a GPU, from its one CSV and named after it."""
    drawn = {"ratio": figures.ratio, "bandwidth": figures.bandwidth, "host": figures.host}
    return tuple(
        Picture(f"{csv.stem}-{name}", draw, (csv.name,), "make bench-gpu")
        for name, draw in drawn.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib, of the extra bench, is not installed")
    results, pictures = args.results, PICTURES
    if args.gpu is not None:
        results, pictures = args.gpu.parent, of_card(args.gpu)
    for picture in pictures:
        for source in picture.sources:
            if not (results / source).is_file():
                parser.error(f"{results / source} does not exist: {picture.written_by} writes it")
    args.folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        rows = [read(results / source) for source in picture.sources]
        style.save(picture.draw(*rows), args.folder / f"{picture.name}.{args.format}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description="The pictures of docs/performance.md, from the CSVs.",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSVs")
    parser.add_argument("--gpu", type=Path, metavar="CSV", help="those of a GPU instead")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where the pictures go")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    return parser


if __name__ == "__main__":
    sys.exit(main())
