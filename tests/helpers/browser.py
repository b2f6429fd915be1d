"""Headless Chromium, for tests of pages and for pictures. Tests are skipped where it is not installed."""

from __future__ import annotations

import base64
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
# A proxy at which nothing answers: no page may need the network.
OFFLINE = "--proxy-server=127.0.0.1:9"


@dataclass(frozen=True)
class Look:
    """How a page is shown: its width in pixels, light or dark, on a screen or in print."""

    width: int = 1000
    scheme: str = "light"
    media: str = "screen"


LOOKS = {
    "light": Look(),
    "dark": Look(scheme="dark"),
    "phone": Look(width=390),
    "print": Look(width=794, scheme="dark", media="print"),
}


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser without network. Skips the test if there is none, or no driver for it."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium here, or no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, OFFLINE):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(driver: Any, page: Path, look: Look = LOOKS["light"]) -> None:
    """Open a page and wait until all charts are drawn. Raises AssertionError with the page's errors."""
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(driver, 30)
    size = {"width": look.width, "height": 900, "deviceScaleFactor": 1.5, "mobile": look.width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": look.scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": look.media, "features": scheme})
    driver.get(page.as_uri())
    drawn = wait.until(lambda _: driver.execute_script("return document.documentElement.dataset.drawn"))
    assert drawn == "all", drawn
    assert driver.get_log("browser") == []


def picture(driver: Any, path: Path, selector: str = "html", most: float = math.inf) -> None:
    """Take a picture of the first element that matches a CSS selector, of at most `most` pixels of its height."""
    script = "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
    script += "return [r.x + scrollX, r.y + scrollY, r.width, r.height]"
    x, y, width, height = driver.execute_script(script, selector)
    clip = {"x": x, "y": y, "width": width, "height": min(height, most), "scale": 1}
    how = {"captureBeyondViewport": True, "format": "png", "clip": clip}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", how)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(found["data"]))
