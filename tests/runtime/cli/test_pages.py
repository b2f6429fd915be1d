"""Each error names a page that helps, and only pages and sections that exist."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import splitc.compiler
import splitc.runtime
from splitc.runtime.cli.pages import COMMAND_PAGES, DOCS, OPTION_PAGES, page_for, read_page
from splitc.runtime.errors import DoesNotFitError, MisuseError, PackageError, SplitcError
from splitc.runtime.files.explained import Interrupted
from tests.helpers.command import splitc as run
from tests.test_docs import PAGES, ROOT, anchors, known_options


def kinds(of: type[SplitcError] = SplitcError) -> Iterator[type[SplitcError]]:
    """A class of errors and its subclasses."""
    yield of
    for each in of.__subclasses__():
        yield from kinds(each)


def test_pages_of_all_errors_are_there() -> None:
    for package in (splitc.runtime, splitc.compiler):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "errors" in module.name or module.name.endswith((".builder", ".explained")):
                importlib.import_module(module.name)
    found = set(kinds())
    assert {each.__name__ for each in found} >= {"ModelError", "CannotSplitError", "BuildError", "SizesError"}
    named = {each.page for each in found if each is not Interrupted}
    for topic in (*named, *OPTION_PAGES.values(), *COMMAND_PAGES.values()):
        assert topic is not None
        assert read_page(topic).startswith("#"), topic


def test_sections_are_those_that_links_lead_to() -> None:
    """Page names are listed once."""
    pages = [page for page in PAGES if page.is_relative_to(DOCS)]
    assert len({page.stem for page in pages}) == len(pages) > 10
    for page in pages:
        for anchor in anchors(page):
            assert read_page(f"{page.stem}#{anchor}").startswith("#")


def test_tables_name_what_there_is() -> None:
    options = known_options()
    assert {each for each in OPTION_PAGES if each.startswith("--")} <= {o for own in options.values() for o in own}
    assert set(COMMAND_PAGES) == set(options) - {"help"}


@pytest.mark.parametrize(
    ("error", "page"),
    [
        (MisuseError("--memory names 'x', and the devices are cpu0"), "planning#budgets"),
        (MisuseError("no such thing as --nothing"), "measuring"),
        (MisuseError("unknown device 'x-d'"), "measuring"),
        (DoesNotFitError("4 GiB short"), "planning#budgets"),
        (PackageError("it is damaged"), "package-format#the-package"),
        (Interrupted("interrupted"), None),
    ],
)
def test_page_is_of_the_option_or_the_kind_or_the_command(error: SplitcError, page: str | None) -> None:
    assert page_for(error, "bench") == page


def test_errors_end_with_their_page(decoder: Path, tmp_path: Path) -> None:
    asked = ("plan", decoder, "-d", "2xcpu")
    assert run(*asked, "--memory", "1KiB", code=3).stderr.endswith("\nsee: splitc help planning#budgets\n")
    assert run(*asked, "--split-mode", "x", code=2).stderr.endswith("\nsee: splitc help planning\n")
    assert run("inspect", tmp_path / "none", code=2).stderr.endswith("\nsee: splitc help package-format#the-package\n")


def test_errors_of_shapes_and_adapters_end_with_their_page(decoder: Path, tmp_path: Path) -> None:
    for given, page in {
        ("--shapes", "input_ids:ax3"): "shapes#shapes-to-plan-for",
        ("--max-shapes", "input_ids:1x3,input_ids:1x4"): "shapes#ranges-for-engines-that-are-built",
        ("--lora", str(tmp_path / "none.safetensors")): "adapters",
    }.items():
        assert run("plan", decoder, "-d", "2xcpu", *given, code=2).stderr.endswith(f"\nsee: splitc help {page}\n")


def test_help_shows_pages_and_sections() -> None:
    shown, page = run("help", "planning").stdout, (DOCS / "guide" / "planning.md").read_text(encoding="utf-8")
    assert shown == re.sub("<!--.*-->\n", "", page) != page, "comments are for tests"
    section = run("help", "planning#budgets").stdout
    assert section.startswith("## Budgets\n") and "## Objectives" not in section
    listed = json.loads(run("help", "--json").stdout)
    assert set(listed) == {page.stem for page in (ROOT / "docs").rglob("*.md")}
    assert "the pages are adapters, architecture" in run("help", "nothing", code=2).stderr
    assert "there are devices, budgets" in run("help", "planning#nothing", code=2).stderr
