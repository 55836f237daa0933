"""The site: how it is built, and opened in a browser."""

import os
import subprocess
import sys
from pathlib import Path

from tests.browser import Browser
from tests.docs.pages import ROOT

COMMAND = ("-m", "mkdocs", "build", "--strict")  # as in the Makefile; --quiet would disarm --strict
PHONE = 390  # CSS pixels
SCREENS = {"desktop": 1280, "phone": PHONE}


def build(folder: Path) -> str:
    """Builds it into a folder; what mkdocs said if it is not content."""
    ended = subprocess.run(
        [sys.executable, *COMMAND, "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    content = ended.returncode == 0 and "WARNING" not in ended.stdout
    content = content and "Documentation built" in ended.stdout  # it says what it thinks
    return "" if content else f"{ended.stdout}\nexit status {ended.returncode}"


def open_page(opened: Browser, page: Path) -> None:
    """Open a page, whose scripts have run then."""
    opened.open(str(page), "return document.documentElement.classList.contains('js')")
