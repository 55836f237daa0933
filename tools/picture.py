"""Draws docs/report.png: the top of a report, of a run with one bad batch.

``python -m tools.picture`` trains examples/train.py for 400 steps (half a minute on two cores), in
which the targets of one batch are random, and opens the report of its log in Chromium. Needs the
extras `report` and `test`, and Chromium (tools/chromium.sh).
"""

import argparse
import base64
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fastclip.cli import main as fastclip
from tests.browser import browser, missing

ROOT = Path(__file__).resolve().parent.parent
STEPS, BAD = 400, 290
WIDTH, HEIGHT = 1200, 1376  # CSS pixels: to the end of the first chart
SCALE = 0.75  # of a pixel of the picture


def example(bad: int | None = BAD) -> ModuleType:
    """examples/train.py, with a text whose batch of that number is bad."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    good = module.Text.batch

    def batch(text: object, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = good(text, number)
        if number == bad:
            generator = torch.Generator().manual_seed(0)
            targets = torch.randint(int(targets.max()), targets.shape, generator=generator)
        return inputs, targets

    module.Text.batch = batch
    return module


def shot(page: Path) -> bytes:
    """A PNG of the top of a page."""
    with browser() as opened:
        opened.screen(WIDTH, HEIGHT)
        opened.scheme("light")
        opened.command("Emulation.setScrollbarsHidden", hidden=True)
        opened.open(str(page))
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": SCALE}
        taken = opened.command("Page.captureScreenshot", format="png", clip=clip)
        return base64.b64decode(taken["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
    out: Path = parser.parse_args().out
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        example().train(Path(folder), STEPS)
        log = Path(folder) / "run.jsonl"
        if status := fastclip(["report", str(log)]):
            sys.exit(status)
        out.write_bytes(shot(log.with_suffix(".html")))
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
