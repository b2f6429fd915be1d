"""The documentation's pages, which are installed with splitc: their text, and the page that helps with an error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from splitc.runtime.errors import MisuseError, SplitcError

# The pages lie beside the two packages, both in the repository and in an installation.
DOCS = Path(__file__).resolve().parents[2] / "docs"
# The options that an error may name, by the page or section about them.
_OF_OPTIONS = {
    "planning#devices": ("--device", "-d"),
    "planning#budgets": ("--memory", "--headroom"),
    "planning#hosts": ("--hosts", "--interconnect", "--rank"),
    "planning#objectives-and-shares": ("--objective", "--tensor-split", "--spread", "--profile", "--threads"),
    "split-modes": ("--split-mode", "--batch-groups", "--pipeline-stages", "--main-device", "--row-min", "--fallback"),
    "placement": ("--place", "--experts", "--weights-at"),
    "split-modes#tensor-mode": ("--explain",),
    "fusion": ("--no-fuse",),
    "planning#editing-the-plan": ("--plan",),
    "shapes#shapes-to-plan-for": ("--shapes",),
    "shapes#ranges-for-engines-that-are-built": ("--min-shapes", "--opt-shapes", "--max-shapes"),
    "shapes#inputs-that-are-settings": ("--set",),
    "shapes#states": ("--state", "--no-state"),
    "pipelines": ("--export", "--module", "--swap"),
    "adapters": ("--lora", "--lora-slots", "--adapter"),
    "checking#made-up-inputs": ("--fill", "--seed"),
    "checking#files-of-arrays": ("--inputs", "--outputs"),
    "checking#the-reference": ("--reference",),
    "checking#what-is-always-checked": ("--verify",),
    "package-format#the-package": ("--weights",),
    "errors#what-is-trusted": ("--trust-external-data",),
    "measuring#bench": ("--baseline", "--baseline-threads", "--in-flight", "--runs", "--before"),
    "measuring#trace": ("--trace",),
    "reports": ("--report",),
    "measuring#devices---measure": ("--measure",),
    "engines": ("--engine", "--workspace", "--timing-cache", "--build", "--weight-streaming"),
    "errors#what-is-written": ("--output", "--force"),
    "speech": ("--audio", "--language", "--task"),
    "genai#images": ("--image",),
    "serving": ("--sequences", "--batch", "--ensemble", "--plans", "--idle", "--capacity"),
    "python#generating": ("--prompt", "--prompt-ids", "--tokenizer", "--prefill", "--prompt-chunk"),
    "gpus#one-process-a-gpu": ("--ranks",),
}
OPTION_PAGES = {option: page for page, options in _OF_OPTIONS.items() for option in options}
# The page about each command.
COMMAND_PAGES = {
    **dict.fromkeys(("plan", "compile"), "planning"),
    "build": "engines",
    "check": "checking",
    "bench": "measuring",
    "devices": "planning#devices",
    "inspect": "package-format",
    "generate": "python#generating",
    "run": "checking#files-of-arrays",
    "export": "serving",
}


def page_for(error: SplitcError, command: str | None) -> str | None:
    """The page and section that help with an error of a command; None if none does.

    It is the page of the first option that a MisuseError names, else of the error's class, else of the command.
    """
    if isinstance(error, MisuseError) and error.page == MisuseError.page:
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", str(error)):
            if option in OPTION_PAGES:
                return OPTION_PAGES[option]
        if type(error) is MisuseError and command in COMMAND_PAGES:
            return COMMAND_PAGES[command]
    return error.page


def read_page(topic: str) -> str:
    """The text of a page, as in `planning`, or of a section of it, as in `planning#budgets`.

    Raises MisuseError if there is no such page or section.
    """
    name, _, section = topic.partition("#")
    pages = page_files()
    if name not in pages:
        raise MisuseError(f"there is no page or command '{name}': the pages are {', '.join(pages)}")
    # Comments are for the tests that run the page's examples.
    lines = re.sub(r"<!--.*?-->\n", "", pages[name].read_text(encoding="utf-8")).splitlines()
    if not section:
        return "\n".join(lines)
    headings = _headings(lines)
    start = next((number for number, (_, anchor) in headings.items() if anchor == section), None)
    if start is None:
        known = ", ".join(_sections(headings))
        raise MisuseError(f"the page '{name}' has no section '{section}': there are {known}")
    ends = (number for number, (level, _) in headings.items() if number > start and level <= headings[start][0])
    return "\n".join(lines[start : next(ends, len(lines))])


def page_files() -> dict[str, Path]:
    """The files of the pages, by name in alphabetical order."""
    return {path.stem: path for path in sorted(DOCS.rglob("*.md"), key=lambda path: path.stem)}


def section_names(page: str) -> list[str]:
    """The sections of a page. Raises MisuseError if there is no such page."""
    return _sections(_headings(read_page(page).splitlines()))


def _sections(headings: Mapping[int, tuple[int, str]]) -> list[str]:
    return [anchor for level, anchor in headings.values() if level > 1]


def _headings(lines: Sequence[str]) -> dict[int, tuple[int, str]]:
    """The level and the anchor of each heading, by line. Lines inside code blocks are not headings."""
    headings, is_code = {}, False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and (heading := re.fullmatch(r"(#+) (.+)", line)):
            anchor = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
            headings[number] = (len(heading[1]), anchor)
    return headings
