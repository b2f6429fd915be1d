"""Every code block of the README and of docs/ runs, page by page, in a folder with small models.

Blocks of the language `sh` are commands, those of `console` commands with their output, and `text` is neither. A block
that can't run here has a comment above it, with the reason: <!--- skip: next "needs two machines" -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from tests.helpers.example_commands import run_console, run_script
from tests.helpers.example_files import IDS, MAKERS, Files
from tests.test_docs import PAGES, ROOT

# The largest share of blocks that may be skipped.
MOST_SKIPPED = 0.3
# Modules whose parts a page's blocks show: the blocks run with the modules' names.
MODULES = {
    "docs/extending.md": (
        *("splitc.compiler.operators.shaping", "splitc.compiler.operators.elementwise", "splitc.runtime.engines.kinds"),
        *("splitc.compiler.request.request", "tests.compiler.operators.test_shaping", "tests.helpers.operators"),
    )
}


class Place:
    """The folder in which the blocks of a page run."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self.folder = folder

    def provide(self, text: str) -> None:
        """Put there what a block names, unless an earlier block has made it."""
        for name in MAKERS:
            if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", text) and not (self.folder / name).exists():
                self._files.put(name, self.folder / name)


def evaluate(example: Example) -> None:
    """Run a block of commands."""
    place: Place = example.namespace["place"]
    place.provide(example.parsed)
    run = run_script if example.region.lexemes["arguments"] == "sh" else run_console
    run(example.parsed, place.folder)


def illustrate(example: Example) -> None:
    assert not re.search(r"^\$? ?(splitc|python|pip) ", example.parsed, re.MULTILINE), "commands are sh or console"


SYBIL = Sybil(
    [
        SkipParser(),
        PythonCodeBlockParser(),
        *(CodeBlockParser(language, evaluate) for language in ("sh", "console")),
        CodeBlockParser("text", illustrate),
    ]
)


@pytest.fixture(scope="session")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("examples"))


def names() -> dict[str, Any]:
    """Names that Python blocks use without defining them, as a reader's program has them."""
    mask = np.ones_like(IDS)
    feeds = {"input_ids": IDS, "attention_mask": mask}
    return {
        **{"ids": IDS, "mask": mask, "feeds": feeds, "positions": np.arange(IDS.shape[1])[None]},
        **{"features": np.zeros((1, 8, 20), np.float32), "decoder_prompt": [50, 52, 54, 56], "end": 51},
        "Any": Any,
        "latents": np.zeros((1, 4, 8, 8), np.float32),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page: Path, example_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = SYBIL.parse(page)
    place = Place(example_files, tmp_path)
    for module in MODULES.get(page.relative_to(ROOT).as_posix(), ()):
        document.namespace.update(vars(import_module(module)))
    document.namespace.update(names(), place=place)
    for example in document.examples():
        if example.region.lexemes and example.region.lexemes.get("arguments") == "python":
            place.provide(example.parsed)
        try:
            example.evaluate()
        except SkipTest:
            continue
        except Exception as error:
            raise AssertionError(f"{page.name}, line {example.line}: {error}") from error


def blocks() -> Iterator[tuple[Path, str, str | None]]:
    """Each block's page and language, and why it is skipped."""
    fence = re.compile(
        r'(?:^ *<!--- skip: next (?P<why>"[^"]+") -->\n)?^ *```(?P<language>\w*)\n.*?^ *```$', re.M | re.S
    )
    for page in PAGES:
        for match in fence.finditer(page.read_text(encoding="utf-8")):
            yield page, match["language"], match["why"]


def test_every_block_has_a_language_that_is_run() -> None:
    wrong = [f"{page.name}: {language}" for page, language, _ in blocks() if language not in LANGUAGES]
    assert not wrong


def test_few_blocks_are_skipped() -> None:
    """Each skipped block has a reason."""
    run = [why for _, language, why in blocks() if language != "text"]
    assert len(run) > 90
    assert sum(why is not None for why in run) <= MOST_SKIPPED * len(run)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!--") == len(re.findall(r'^ *<!--- skip: next ".+" -->\n *```', text, re.MULTILINE))


LANGUAGES = ("sh", "console", "python", "text")
