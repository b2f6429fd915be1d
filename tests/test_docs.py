"""The documentation: links lead somewhere, and what it names is there. `test_examples.py` runs its code."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from splitc.runtime.cli.app import COMMANDS, command_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_LINES = 150
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?:compiler|runtime|tests|models)/[\w/]*(?:\.py|/)")

# Options of pip, Python scripts, mpirun, Slurm and Docker, which the pages name too.
OF_OTHERS = (
    *("--extra-index-url", "--help", "--install-completion", "--bind-to", "--hostfile", "--mpi", "--distribution"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--gpus-per-task", "--cpus-per-task", "--no-deps"),
    *("--cpus", "--shm-size", "--init", "--target", "--gpus", "--volume", "--user"),
)

# What the recipes of the page on extending add.
MADE_UP = {"most_stages", "mirrored", "imaginary"}
# The modules with the schemas of the package's and the plan's files.
FORMATS = (
    *("runtime/package/manifest.py", "runtime/package/states.py", "runtime/package/pipeline_file.py"),
    *("runtime/package/steps.py", "compiler/planning/plan_file.py", "compiler/pipelines/plan_file.py"),
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of code."""
    for indent, language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)


def command_lines(page: Path) -> list[list[str]]:
    """The words of each line of code that runs splitc."""
    blocks = (text.replace("\\\n", " ") for language, text in code(page) if language in ("sh", "console"))
    lines = (line.strip() for text in blocks for line in text.split("\n"))
    found = (re.search(r"^(?:\$ |mpirun .*|srun .*|docker run .*)?(splitc .*)", line) for line in lines)
    return [shlex.split(match[1], comments=True) for match in found if match]


def spans(page: Path) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def known_options() -> dict[str, set[str]]:
    """The options of each command."""
    return {
        name: {option for each in command_of(name).params for option in (*each.opts, *each.secondary_opts)}
        for name in COMMANDS
    }


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{link}: there is no {target}"
            assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_readme_leads_to_every_page() -> None:
    reached, new = set[Path](), {PAGES[0]}
    while new:
        page = new.pop()
        reached.add(page)
        links = (link.partition("#")[0] for link in _LINK.findall(prose(page)))
        new |= {target for link in links if (target := (page.parent / link).resolve()) in PAGES} - reached
    assert reached == set(PAGES)


def test_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@each_page
def test_commands_have_their_options(page: Path) -> None:
    known = known_options()
    for _, name, *words in command_lines(page):
        assert name in known, f"splitc has no command {name}"
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known[name], f"splitc {name} has no {given - known[name]}"


def test_commands_are_found() -> None:
    named = {words[1] for page in PAGES for words in command_lines(page)}
    assert named == {
        *("plan", "compile", "build", "run", "check", "bench", "generate", "inspect", "devices", "help", "export")
    }


@each_page
def test_options_that_are_named_exist(page: Path) -> None:
    """In backquotes: of any command, or of another program."""
    known = {*OF_OTHERS, *(option for options in known_options().values() for option in options)}
    named = {word for span in spans(page) for word in span.split() if word.startswith("--")}
    assert {word.partition("=")[0] for word in named} <= known


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for span in spans(page):
        for path in _PATH.findall(span) if _PATH.match(span) else ():
            assert (ROOT / path).exists(), f"there is no {path}"


@pytest.mark.parametrize("page", ["architecture", "extending"])
def test_names_in_the_code_exist(page: str) -> None:
    """Functions, classes, methods and fields in backquotes: somewhere in the two packages, or in what tests share."""
    files = (path for room in ("compiler", "runtime", "tests/helpers") for path in (ROOT / room).rglob("*.py"))
    words = {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))} | MADE_UP
    for span in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", prose(ROOT / "docs" / f"{page}.md")):
        for name in span.split("."):
            assert name in words, f"nothing is named {name}"


@pytest.mark.parametrize("half", ["compiler", "runtime"])
def test_architecture_has_every_room(half: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / half).glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{half}/{room}/` |" not in text} == set()


@pytest.mark.parametrize("file", FORMATS)
def test_package_format_has_every_field(file: str) -> None:
    """Of the files that splitc writes: the fields of the classes that are their schema."""
    named = {word for span in spans(ROOT / "docs" / "package-format.md") for word in re.findall(r"\w+", span)}
    classes = (
        node for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    )
    fields = {
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert fields - named == set()


def test_each_term_is_defined_once() -> None:
    terms = re.findall(
        r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(terms) > 40
    assert len(terms) == len(set(terms))


def test_site_has_every_page() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md", "examples/README.md")
    assert sorted(listed) == sorted([*others, *(page.relative_to(ROOT).as_posix() for page in PAGES)])
