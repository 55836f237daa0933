"""The site: how it is built, and opened in a browser."""

import os
import subprocess
import sys
from pathlib import Path

from tests.browser import Browser
from tests.docs.pages import ROOT

COMMAND = ("-m", "mkdocs", "build", "--quiet", "--strict")  # as in the Makefile
PHONE = 390  # CSS pixels
SCREENS = {"desktop": 1280, "phone": PHONE}


def build(folder: Path) -> str:
    """Builds it into a folder; what mkdocs said, which is nothing if all is well."""
    ended = subprocess.run(
        [sys.executable, *COMMAND, "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.stdout if ended.returncode == 0 else ended.stdout or "mkdocs failed"


def open_page(opened: Browser, page: Path) -> None:
    """Open a page, whose scripts have run then."""
    opened.open(str(page), "return document.documentElement.classList.contains('js')")
