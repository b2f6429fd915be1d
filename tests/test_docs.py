"""The documentation holds: links lead somewhere, files that it names exist, code and options in it are real."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import typer.main

import splitc.compiler.cli  # noqa: F401  # adds its commands
from splitc.runtime.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:compiler|runtime|models|tests|docs)/[\w/.]*)`")
COMMANDS = typer.main.get_command(app)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as hosts of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def indented_blocks(page: Path) -> list[str]:
    """Code and terminal sessions, without their indentation."""
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def commands(page: Path) -> list[list[str]]:
    """Each command line of splitc on a page, in words; a backslash continues it."""
    lines = "".join(indented_blocks(page)).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split() for line in lines if line.removeprefix("$ ").startswith("splitc ")]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_it_names_exist(page: Path) -> None:
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"there is no {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_and_options_are_real(page: Path) -> None:
    known = COMMANDS.commands  # type: ignore[attr-defined]  # Typer's group
    for words in commands(page):
        assert words[1] in known or words[1].startswith("-"), f"no such command: {' '.join(words)}"
        if words[1] in known:
            command = known[words[1]]
            options = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
            used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert used <= options, f"{' '.join(words)} has {sorted(used - options)}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_compiles_and_quotes_are_exact(page: Path) -> None:
    operators = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "compiler/operators").glob("*.py"))
    for block in indented_blocks(page):
        if re.match(r"(import|from|with|def) ", block):
            compile(block, page.name, "exec")
        if block.startswith(("def ", "Operator(")):
            assert block.strip() in operators, f"not in compiler/operators: {block.splitlines()[0]}"


def test_the_glossary_defines_each_word_once() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(words) > 50
    assert [word for word, count in Counter(words).items() if count > 1] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
