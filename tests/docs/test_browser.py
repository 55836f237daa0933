"""The pages in a real browser, opened from the disk: in the light and in the dark, on a phone, and
searched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, browser, missing
from tests.docs.site import PHONE, SCREENS, open_page
from tests.docs.test_site import BUILT

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# Elements that stick out of the screen, but for those in a box that scrolls.
WIDE = """
const room = document.documentElement.clientWidth;
const scrolls = (element) => element && element !== document.body
  && (['auto', 'scroll', 'hidden'].includes(getComputedStyle(element).overflowX)
      || scrolls(element.parentElement));
return [...document.querySelectorAll('.md-content *')].filter(element => {
  const box = element.getBoundingClientRect();
  return box.width && box.right > room + 1 && !scrolls(element);
}).map(element => element.outerHTML.slice(0, 120));
"""
GROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as one:
        one.command("Emulation.setScrollbarsHidden", hidden=True)
        yield one


@pytest.fixture(autouse=True)
def _quiet(opened: Browser) -> Iterator[None]:
    """On a desktop in daylight; and no test leaves a complaint behind."""
    opened.screen(SCREENS["desktop"])
    opened.scheme("light")
    yield
    assert opened.complaints() == []


@pytest.mark.parametrize("page", BUILT)
def test_page(opened: Browser, site: Path, page: str) -> None:
    open_page(opened, site / page)
    grounds = set()
    for width in SCREENS.values():
        opened.screen(width, phone=width == PHONE)
        for scheme, palette in {"light": "default", "dark": "slate"}.items():
            opened.scheme(scheme)
            opened.until("return document.body.dataset.mdColorScheme === arguments[0]", palette)
            grounds.add(opened.evaluate(GROUND))
            root = "document.documentElement"
            wide, room = opened.evaluate(f"return [{root}.scrollWidth, {root}.clientWidth]")
            assert wide <= room == width
            assert opened.evaluate(WIDE) == []
    assert len(grounds) == 2
    files = [url for url in opened.requested() if not url.startswith(("data:", "blob:"))]
    assert files
    assert [url for url in files if not url.startswith(f"file://{site}/")] == []


def test_tables_scroll_on_a_phone(opened: Browser, site: Path) -> None:
    opened.screen(PHONE, phone=True)
    open_page(opened, site / "fault-lab.html")
    wide, room = opened.evaluate(
        "const box = document.querySelectorAll('.md-typeset__scrollwrap')[1];"
        "return [box.scrollWidth, box.clientWidth]"
    )
    assert room <= PHONE < wide


@pytest.mark.parametrize("page", ["recovery.html", "api/rules.html"])
def test_the_search_finds_a_function(opened: Browser, site: Path, page: str) -> None:
    open_page(opened, site / page)
    opened.evaluate(
        "const field = document.querySelector('.md-search__input'); field.focus();"
        "field.value = 'clip_grad_norm_'; field.dispatchEvent(new Event('keyup'));"
    )
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"
    opened.until(f"return (() => {{ {links} }})().length > 3")
    found = [link.rpartition("/site/")[2].partition("?")[0] for link in opened.evaluate(links)]
    assert "api/functions.html" in found
    assert all(link.startswith(tuple(BUILT)) for link in found)


def test_the_button_changes_the_colours(opened: Browser, site: Path) -> None:
    open_page(opened, site / "recovery.html")
    label = "[...document.querySelectorAll('label[for^=__palette]')].find(e => !e.hidden)"
    opened.until(f"return {label}")
    before = opened.evaluate(GROUND)
    seen = set()
    for _ in range(3):
        opened.evaluate(f"{label}.click()")
        seen.add(opened.evaluate(GROUND))
    assert len(seen) == 2
    assert opened.evaluate(GROUND) == before


def test_code_can_be_copied(opened: Browser, site: Path) -> None:
    open_page(opened, site / "recovery.html")
    blocks, buttons = (
        f"document.querySelectorAll('.md-content {part}').length"
        for part in ("pre", "pre .md-code__button, .md-code__nav")
    )
    opened.until(f"return {buttons} > 0")
    assert opened.evaluate(f"return {buttons} >= {blocks}")
