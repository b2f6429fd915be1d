"""Pages in a browser without a network: in light and dark style, on a phone and in print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import LOOKS, open_browser, picture, show
from tests.helpers.command import ROOT, splitc

# Where pictures of each run are kept, for people to look at.
KEPT = ROOT / ".cache" / "pictures"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(browser: Any, decoder: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each command."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("plan", "inspect", "bench", "check")}
    splitc("plan", decoder, "-d", "3xcpu", "--memory", "40MiB", "--spread", "--report", found["plan"])
    splitc("inspect", package, "--report", found["inspect"])
    splitc("bench", package, "--in-flight", 2, "--runs", 16, "--report", found["bench"])
    splitc("check", package, "--model", decoder, "--no-memory", "--report", found["check"])
    return found


def colours(browser: Any) -> tuple[int, int]:
    """The brightness of the page's background and of its text."""
    script = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    back, ink = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in browser.execute_script(script))
    return back, ink


def count(browser: Any, selector: str) -> int:
    return int(browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


@pytest.mark.parametrize("look", LOOKS)
def test_pages_are_drawn_and_fit(browser: Any, pages: dict[str, Path], look: str) -> None:
    """Every chart has marks and fits the page; dark pages are dark, and print looks like light."""
    for name, page in pages.items():
        show(browser, page, LOOKS[look])
        picture(browser, KEPT / f"{name}-{look}.png")
        charts = count(browser, "figure")
        assert charts == count(browser, "figure svg") > 0
        assert count(browser, "figure .mark-rect path, figure .mark-symbol path") >= charts
        wide, window = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window
        script = "return [...document.querySelectorAll('svg')].every(e => e.clientWidth <= e.parentElement.clientWidth"
        assert browser.execute_script(f"{script} + 1)")
        script = "return [...document.querySelectorAll('.overview')].filter(e => e.clientHeight).length"
        assert look != "print" or browser.execute_script(script) == 0, "nobody draws across paper"
        back, ink = colours(browser)
        assert (back < ink) == (look == "dark")


def test_strip_has_a_colour_a_device(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["inspect"])
    script = "return [...document.querySelectorAll('.cells')].map(e => getComputedStyle(e.firstChild).backgroundColor)"
    assert len(set(browser.execute_script(script))) == 3
    assert count(browser, ".cut") == 2


def test_a_part_of_a_timeline_is_enlarged(browser: Any, pages: dict[str, Path]) -> None:
    """By dragging across the small chart; a click shows all again."""
    chains = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
    show(browser, pages["bench"])
    script = "return [...document.querySelectorAll('.chart[data-overview]')[0].querySelectorAll('.mark-text text')]"
    labels = f"{script}.map(e => e.textContent).sort().join()"
    before = browser.execute_script(labels)
    small = browser.find_element("css selector", ".overview svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", small)
    draw = chains(browser).move_to_element_with_offset(small, -60, 0).click_and_hold().move_by_offset(60, 0)
    draw.release().perform()
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.execute_script(labels) != before
    chains(browser).move_to_element_with_offset(small, 200, 0).click().perform()
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.execute_script(labels) == before


def test_node_is_found_by_parts_of_its_name(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["plan"])
    box = browser.find_element("css selector", ".search input")
    box.send_keys("MatMul_5 layers.1/")
    lines = browser.find_elements("css selector", ".search tbody tr")
    assert [line.text.split()[:3] for line in lines] == [["/model/layers.1/self_attn/MatMul_5", "MatMul", "layers.1"]]
    box.send_keys(" nowhere")
    assert not browser.find_elements("css selector", ".search tbody tr")
    assert browser.find_element("css selector", ".search .note").text.startswith("0 of")


def test_tables_fit_a_phone(browser: Any, pages: dict[str, Path]) -> None:
    """The table of the slowest blocks does, and no option in the verdict is broken at a line's end."""
    show(browser, pages["plan"], LOOKS["phone"])
    wide, room = browser.execute_script(
        "const blocks = [...document.querySelectorAll('.wide')].find(each => each.innerText.startsWith('block'));"
        "return [blocks.scrollWidth, blocks.clientWidth]"
    )
    assert wide <= room
    lines = "return [...document.querySelectorAll('.option')].map(each => each.getClientRects().length)"
    assert set(browser.execute_script(lines)) == {1}


def test_numbers_are_unfolded_in_print(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["plan"])
    assert count(browser, "details") > count(browser, "details[open]") == 0
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert count(browser, "details") == count(browser, "details[open]")
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert count(browser, "details[open]") == 0
