"""The page in a real browser: it draws, hovers, zooms, turns dark, fits a phone, and is safe."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fastclip.cli import main
from tests.browser import Browser, browser, missing
from tests.monitor.making import changed, healthy, times
from tests.monitor.report.logs import HOSTILE, NAMES, baseline, eventful, hostile, layers, saved

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

PHONE = 360  # pixels
PIXEL = """
const div = document.getElementById(arguments[0]), layout = div._fullLayout;
const pixel = (axis, value) =>
  axis.c2p(axis.type === 'category' ? axis._categories.indexOf(value) : axis.d2c(value));
div.scrollIntoView({block: 'center'});
const box = div.getBoundingClientRect(), size = layout._size;
return [box.left + size.l + pixel(layout.xaxis, arguments[1]),
        box.top + size.t + pixel(layout.yaxis, arguments[2])];
"""
RANGE = "return document.getElementById(arguments[0]).layout.xaxis.range"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    amended = [replace(eventful()[step], layers=layers(step)) for step in range(490, 500)]
    run = saved(folder / "run.jsonl", eventful(), amended)
    other = saved(folder / "baseline.jsonl", baseline())
    evil = saved(folder / f"{HOSTILE.replace('/', '')}.jsonl", hostile())
    spiky = changed(healthy(2500), (range(200, 2500, 15), "grad_norm", times(60)))
    many = [saved(folder / f"{name}.jsonl", spiky) for name in ("many", "more")]
    commands = {"one": [run], "two": [run, other], "evil": [evil], "many": many}
    for name, logs in commands.items():
        assert main(["report", *logs, "-o", str(folder / f"{name}.html")]) == 0
    return {name: str(folder / f"{name}.html") for name in commands}


@pytest.fixture(autouse=True)
def _quiet(opened: Browser) -> Iterator[None]:
    """On a desktop in daylight; and no test leaves a complaint behind."""
    opened.screen(1280)
    opened.scheme("light")
    yield
    assert opened.complaints() == []


@pytest.fixture
def one(opened: Browser, pages: dict[str, str]) -> Browser:
    opened.open(pages["one"])
    return opened


def texts(one: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    found: list[str] = one.evaluate(script, selector)
    return found


def shown(one: Browser, chart: str, x: float | str, y: float | str) -> tuple[float, float]:
    """Where a value is on the screen, once it is scrolled there."""
    left, top = one.evaluate(PIXEL, chart, x, y)
    return left, top


def hovered(one: Browser, chart: str, x: float | str, y: float | str, expected: str) -> str:
    """The label there, as soon as it begins as expected."""
    left, top = shown(one, chart, x, y)
    one.mouse("Moved", left + 3, top + 3)
    one.mouse("Moved", left, top)
    label = "document.querySelector(arguments[0])?.textContent"
    ready = f"const text = {label}; return text && text.startsWith(arguments[1]) && text"
    text: str = one.until(ready, f"#{chart} .hovertext", expected)
    return text


def test_everything_is_drawn_and_nothing_is_loaded(one: Browser, pages: dict[str, str]) -> None:
    drawn = one.evaluate("return document.querySelectorAll('.plot .main-svg').length")
    assert drawn >= int(one.evaluate("return document.documentElement.dataset.drawn")) == 11
    lines = one.evaluate(
        "return document.querySelectorAll('#chart-loss .scatterlayer path.js-line').length"
    )
    assert lines >= 2
    assert one.evaluate("return document.getElementById('status').hidden")
    requested = {url.split(",")[0] for url in one.requested() if not url.startswith("blob:")}
    assert requested - {"data:image/png;base64"} == {f"file://{pages['one']}"}


def test_the_table_of_events_is_there(one: Browser) -> None:
    rows = texts(one, ".incident")
    assert len(rows) == 18
    assert "activation_max" in rows[3]
    assert "the last 5 values of loss" in rows[1]
    one.evaluate("document.querySelector('.incident details').open = true")
    cells = one.evaluate(
        "return [...document.querySelectorAll('.incident td td')].map(e => e.innerText)"
    )
    assert cells[:7] == ["150", "spike", "loss", "7.6969", "4.16096", "warn", "150"]


def test_hovering_tells_the_value(one: Browser) -> None:
    loss = eventful()[0].loss
    assert loss
    text = hovered(one, "chart-loss", 0, loss, "step 0, attempt 0")
    assert f"loss {loss:.6g}" in text


def test_hovering_over_a_layer_tells_its_name(one: Browser) -> None:
    text = hovered(one, "layers-nonfinite-1", "500", NAMES[31], NAMES[31])
    assert text == f"{NAMES[31]}step 500share 0.0001"


def test_dragging_zooms_all_charts_and_a_double_click_goes_back(one: Browser) -> None:
    whole = one.evaluate(RANGE, "chart-loss")
    start, end = shown(one, "chart-grad_norm", 500, 1.0), shown(one, "chart-grad_norm", 1000, 1.0)
    one.drag(start, end)
    one.until(f"{RANGE}[1] < 1100", "chart-loss")
    for chart in ("chart-grad_norm", "chart-loss", "chart-lr", "chart-update_ratio"):
        assert one.evaluate(RANGE, chart) == pytest.approx([500, 1000], abs=5)
    assert one.evaluate("return document.getElementById('calibration').layout.xaxis.autorange")
    # A busy machine clicks slowly.
    one.evaluate("document.getElementById('chart-grad_norm')._context.doubleClickDelay = 10_000")
    one.double_click(*shown(one, "chart-grad_norm", 750, 1.0))
    one.until(f"{RANGE}[1] > 1900", "chart-loss")
    for chart in ("chart-grad_norm", "chart-loss", "chart-lr"):
        assert one.evaluate(RANGE, chart) == whole


def test_an_axis_turns_logarithmic_and_back(one: Browser) -> None:
    script = "return document.getElementById('chart-loss').layout.yaxis.type"
    assert one.evaluate(script) == "linear"
    for expected in ("log", "linear"):
        one.evaluate("document.querySelector('[data-log=chart-loss]').click()")
        one.until(f"{script} === arguments[0]", expected)
        pressed = one.evaluate("return document.querySelector('[data-log=chart-loss]').ariaPressed")
        assert pressed == str(expected == "log").lower()


COLORS = """
const css = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
return [css('body', 'backgroundColor'), css('body', 'color'),
        css('#chart-loss .js-line', 'stroke'), css('#chart-loss .xtick text', 'fill')];
"""


def brightness(color: str) -> float:
    """From 0 to 255, of "rgb(r, g, b)"."""
    red, green, blue = (float(part.strip(" )")) for part in color.split("(")[1].split(",")[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_dark_mode_is_followed_at_once_and_keeps_the_zoom(one: Browser) -> None:
    one.drag(shown(one, "chart-loss", 500, 3), shown(one, "chart-loss", 1000, 3))
    one.until(f"{RANGE}[1] < 1100", "chart-lr")
    light = [brightness(color) for color in one.evaluate(COLORS)]
    before = one.evaluate("return document.querySelector('#chart-loss .js-line').style.stroke")
    one.scheme("dark")
    line = "document.querySelector('#chart-loss .js-line').style.stroke"
    one.until(f"return {line} !== arguments[0]", before)
    dark = [brightness(color) for color in one.evaluate(COLORS)]
    assert light[0] > 200 > 60 > dark[0]
    assert light[1] < 60 < 200 < dark[1]
    assert dark[2] > light[2]
    assert dark[3] > light[3]
    assert one.evaluate(RANGE, "chart-loss") == pytest.approx([500, 1000], abs=5)


SMALL = """
return [...document.querySelectorAll('main *:not(path, tspan)')].filter(element => {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  return own && element.getClientRects().length
    && parseFloat(getComputedStyle(element).fontSize) < 14;
}).map(element => element.outerHTML.slice(0, 100));
"""


@pytest.mark.parametrize(
    ("name", "width"), [("one", PHONE), ("two", PHONE), ("evil", PHONE), ("two", 768)]
)
def test_a_narrow_screen_is_not_left(
    opened: Browser, pages: dict[str, str], name: str, width: int
) -> None:
    opened.screen(width, 800, phone=True)
    opened.open(pages[name])
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    root = "document.documentElement"
    wide, room = opened.evaluate(f"return [{root}.scrollWidth, {root}.clientWidth]")
    assert wide <= room == width
    assert opened.evaluate(SMALL) == []
    turned = "[...document.querySelectorAll('.cbaxis text')].filter(e => /rotate\\(-?[1-9]/"
    assert opened.evaluate(f"return {turned}.test(e.getAttribute('transform'))).length") == 0
    # A swipe over a chart scrolls the page.
    assert opened.evaluate("return document.getElementById('chart-loss').layout.dragmode") is False
    plot = opened.evaluate(
        "return document.querySelector('#chart-loss .nsewdrag').getBoundingClientRect()"
    )
    assert plot["width"] > 0.65 * width
    assert plot["height"] > 150


@pytest.mark.parametrize("width", [PHONE, 768, 1280])
def test_numbers_of_incidents_do_not_overprint(
    opened: Browser, pages: dict[str, str], width: int
) -> None:
    opened.screen(width, 800, phone=width == PHONE)
    opened.open(pages["many"])
    boxes = opened.evaluate(
        "return [...document.querySelectorAll('#chart-loss .annotation-text')].map(e => "
        "({text: e.textContent, ...e.getBoundingClientRect().toJSON()}))"
    )
    for run in "AB":
        row = [box for box in boxes if box["text"].startswith(run)]
        assert len(row) > 4
        for left, right in pairwise(row):
            assert left["right"] < right["left"]


def test_two_runs_are_overlaid(opened: Browser, pages: dict[str, str]) -> None:
    opened.open(pages["two"])
    lines = "[...document.querySelectorAll('#chart-loss .js-line')]"
    colors = opened.evaluate(f"return {lines}.map(line => line.style.stroke)")
    assert len(set(colors)) == 2
    assert opened.evaluate("return document.querySelectorAll('table.incidents').length") == 1
    assert [text for text in texts(opened, "h3") if "baseline" in text]


def test_what_a_log_says_does_nothing(opened: Browser, pages: dict[str, str]) -> None:
    opened.open(pages["evil"])
    assert (
        opened.evaluate("return document.querySelectorAll('img, iframe, .plot a[href]').length")
        == 0
    )
    labels = texts(opened, "#layers-norms-1 .ytick text")
    assert "<b>bold</b>&amp;" in labels
    assert "var(--fg)" in labels
    assert (
        opened.evaluate(
            "return document.querySelectorAll('#layers-norms-1 .ytick tspan[style]').length"
        )
        == 0
    )


def test_without_unpacking_there_are_tables_and_a_sentence(
    opened: Browser, pages: dict[str, str]
) -> None:
    """As in a browser from before 2023."""
    script = opened.command(
        "Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream"
    )
    try:
        opened.open(pages["one"])
    finally:
        opened.command("Page.removeScriptToEvaluateOnNewDocument", **script)
    status = opened.evaluate("return document.getElementById('status').innerText")
    assert status.startswith("This browser cannot unpack the charts")
    assert len(texts(opened, ".incident")) == 18
    assert opened.evaluate("return document.querySelector('.plot').getClientRects().length") == 0


def test_it_prints(one: Browser) -> None:
    found: Any = one.command("Page.printToPDF", printBackground=True)
    assert len(found["data"]) > 50_000
