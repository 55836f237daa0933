"""Pictures of every page of the documentation, as readers see them.

``python -m tools.screenshots FOLDER`` builds the site and writes ``FOLDER/PAGE-SCREEN-SCHEME.png``
for a desktop and a phone, in the light and in the dark. Needs the extras `docs` and `test`, and
Chromium (tools/chromium.sh).
"""

import argparse
import base64
import sys
import tempfile
from pathlib import Path

from tests.browser import Browser, browser, missing
from tests.docs.site import PHONE, SCREENS, build, open_page

TALLEST = 6000  # CSS pixels of a page that are taken


def shot(opened: Browser, width: int) -> bytes:
    """A PNG of the page from its top."""
    height = min(TALLEST, opened.evaluate("return document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    taken = opened.command(
        "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
    )
    return base64.b64decode(taken["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="pages whose name contains it")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as built, browser() as opened:
        if said := build(Path(built)):
            sys.exit(said)
        opened.command("Emulation.setScrollbarsHidden", hidden=True)
        for page in sorted(Path(built).rglob("*.html")):
            name = page.relative_to(built).with_suffix("").as_posix().replace("/", "-")
            if options.only not in name:
                continue
            for screen, width in SCREENS.items():
                for scheme in ("light", "dark"):
                    opened.scheme(scheme)
                    opened.screen(width, phone=width == PHONE)
                    open_page(opened, page)
                    out = options.folder / f"{name}-{screen}-{scheme}.png"
                    out.write_bytes(shot(opened, width))
                    print(out)


if __name__ == "__main__":
    main()
