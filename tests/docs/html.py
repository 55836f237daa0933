"""What a built page holds: anchors, and what it points at."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path

# What a browser fetches by itself, and what somebody has to click on.
_LOADED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src")}
_LOADED |= {("link", "href"), ("object", "data"), ("video", "src"), ("input", "src")}


class Parsed(HTMLParser):
    """Of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.classes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id":
                self.anchors.append(value)
            elif name == "class":
                self.classes += value.split()
            elif (tag, name) in _LOADED:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


@cache
def parsed(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))
