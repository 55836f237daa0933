"""A Chromium without a window: opens pages, moves its mouse, and tells what it complained of."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Of the page of a report: everything is drawn, or it says why not.
DRAWN = (
    "return document.documentElement.dataset.drawn !== undefined"
    " || !document.getElementById('status').hidden"
)


def missing() -> str | None:
    """Why there is no browser to test with, or None."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed"
    found = (shutil.which("chromium"), shutil.which("chromedriver"))
    return None if all(found) else "no Chromium: tools/chromium.sh installs it"


class Browser:
    """At most one page at a time. `evaluate` runs the body of a function in it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, path: str, ready: str = DRAWN) -> None:
        """Wait until `ready`, the body of a function, is true of the page."""
        self._driver.get_log("performance")
        self._driver.get(f"file://{path}")
        self.until(ready)

    def evaluate(self, body: str, *arguments: Any) -> Any:
        return self._driver.execute_script(body, *arguments)

    def until(self, body: str, *arguments: Any, seconds: float = 30) -> Any:
        """The first value of it that is true."""
        stop = time.monotonic() + seconds
        while not (value := self.evaluate(body, *arguments)):
            assert time.monotonic() < stop, f"never true: {body}"
            time.sleep(0.05)
        return value

    def command(self, name: str, **arguments: Any) -> Any:
        """One of the DevTools protocol."""
        return self._driver.execute_cdp_cmd(name, arguments)

    def screen(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)

    def scheme(self, name: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": name}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        button = "left" if clicks else "none"
        self.command(
            "Input.dispatchMouseEvent",
            **{"type": f"mouse{kind}", "x": x, "y": y, "button": button, "clickCount": clicks},
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, clicks=1)
        for part in (0.3, 0.6, 1.0):
            x, y = (a + part * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("Moved", x, y, clicks=1)
        self.mouse("Released", *end, clicks=1)

    def double_click(self, x: float, y: float) -> None:
        for clicks in (1, 2):
            self.mouse("Pressed", x, y, clicks=clicks)
            self.mouse("Released", x, y, clicks=clicks)

    def complaints(self) -> list[str]:
        """What the console got since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requested(self) -> list[str]:
        """What was asked for since the page was opened, the beginning of each address."""
        messages = (
            json.loads(e["message"])["message"] for e in self._driver.get_log("performance")
        )
        return [
            message["params"]["request"]["url"][:200]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def browser() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.geteuid() == 0:  # its sandbox does not work for root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
