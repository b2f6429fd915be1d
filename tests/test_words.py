"""Words and names that were retired: from identifiers, and from what people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from tests.test_docs import PAGES, prose

# Names that say nothing of what they hold.
RETIRED_NAMES = {"each", "found"}
CODE = ("compiler", "runtime")
# What stands in place of phrases that people had to read twice.
RETIRED_PHRASES = {
    r"computed again": "recomputed, rematerialized",
    r"(fullest|device with) [\w ]*most room|has most room": "leaves the most free memory",
    r"about as fast \(the fastest": "within 5 %",
    r"compared with the unsplit model on": "reference: the unsplit model on",
    r", as the package\b": "on the package's kind of device",
    r"can't be told of a rank": "can't be cancelled by a failing peer",
    r"wanted, not needed": "optional but recommended",
    r"only looked up in": "an embedding table",
    r"parts do not line up": "its sections have different sizes",
    r"pages? of pictures": "report",
    r"under way": "in flight",
    r"blank rows": "entirely masked rows",
    r"too little to gain": "splitting it would save too little",
    r"takes? the extremes": "needs statistics",
    r"\b(it|axis) is (indexed|written by index)": "it selects (writes) elements by index",
    r"(rows|sizes) take turns": "rows are interleaved",
    r"norms? (of )?halves": "norms of float16 values",
    r"by falling (gain|budget)": "the highest gain first",
    r"nothing of them is left": "weight 0",
}
# All at once, for texts that have none of them.
ANY_PHRASE = re.compile("|".join(RETIRED_PHRASES), re.IGNORECASE)


def modules(place: str) -> Iterator[Path]:
    """The modules of a room, or the one that is named."""
    path = ROOT / place
    yield from path.rglob("*.py") if path.is_dir() else [path]


@pytest.mark.parametrize("place", CODE)
def test_code_has_no_retired_names_and_phrases(place: str) -> None:
    for path in modules(place):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            assert name not in RETIRED_NAMES, f"{path.relative_to(ROOT)}, line {node.lineno}: '{name}'"  # type: ignore[attr-defined]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a message, help or a docstring
                check(node.value, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_no_retired_phrases(page: Path) -> None:
    check(prose(page), page)


def test_retired_names_and_phrases_would_be_found() -> None:
    with pytest.raises(AssertionError, match="recomputed"):
        check("19 cheap nodes are\ncomputed again", ROOT / "README.md")


def check(text: str, path: Path) -> None:
    flat = re.sub(r"\s+", " ", text)
    if ANY_PHRASE.search(flat) is None:
        return
    for phrase, instead in RETIRED_PHRASES.items():
        match = re.search(phrase, flat, re.IGNORECASE)
        assert match is None, f"{path.relative_to(ROOT)}: '{match[0]}' was retired; write '{instead}'"  # type: ignore[index]
