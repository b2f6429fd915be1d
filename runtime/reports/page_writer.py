"""Write a page: one file with its charts, style and scripts, which needs no network."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.files.written import written_whole
from splitc.runtime.units import block_range, format_bytes, visible

if TYPE_CHECKING:
    from splitc.runtime.reports.contents import Page

# The libraries that only pages need, by the name of the module.
LIBRARIES = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "jinja2"}
# The most blocks of a stage that are drawn one by one.
CELLS = 160


def check_report(path: Path | None) -> None:
    """Raise MisuseError if a page is asked for and libraries are missing."""
    if path is None:
        return
    if missing := [package for module, package in LIBRARIES.items() if find_spec(module) is None]:
        raise MisuseError(
            f"--report needs {', '.join(missing)}, not installed here: pip install 'splitc[report]'. The numbers are "
            "the same without it, and --json gives all of them"
        )


def write_page(path: Path, page: Page) -> None:
    """Write a page of about 1 MB, most of it the script that draws. Raises MisuseError if it can't be written."""
    from splitc.runtime.reports.machine_facts import machine_facts  # few commands write a page
    from splitc.runtime.reports.strips import colour_of

    jinja2: Any = importlib.import_module("jinja2")
    folder = Path(__file__).parent
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # as text is, for `visible`
    environment.filters["bytes"] = format_bytes
    environment.filters["range"] = block_range
    environment.filters["options"] = _with_whole_options
    environment.globals.update(colour=colour_of, machine=machine_facts(), most=CELLS)
    # In the order of the page; of each section first the chart, then its overview.
    sections = [section for chapter in page.chapters for section in chapter.sections]
    charts = [chart for section in sections for chart in (section.chart, section.overview) if chart is not None]
    searches = [list(section.search.rows) for section in sections if section.search is not None]
    text = visible(environment.get_template("page.html").render(page=page, charts=charts, searches=searches))
    script = _script().replace("</script", "<\\/script")
    style, own = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    with written_whole(path) as file:
        for part in (text, f"<style>\n{style}</style>\n", f"<script>{script}</script>\n<script>\n{own}</script>\n"):
            file.write(part.encode())


def _with_whole_options(text: str) -> str:
    """Text as HTML in which no line ends inside an option's name."""
    markupsafe: Any = importlib.import_module("markupsafe")
    html = re.sub(r"--[a-z][a-z-]*", r'<span class="option">\g<0></span>', str(markupsafe.escape(text)))
    return markupsafe.Markup(html)  # type: ignore[no-any-return]


@cache
def _script() -> str:
    """Vega, Vega-Lite and what embeds them, in the version that the charts are made for.

    It is kept in the user's cache, if that can be written: it takes seconds to make.
    """
    vega_lite = importlib.import_module("altair").SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
    maker = importlib.import_module("vl_convert")
    name = f"vega-lite-{vega_lite}-{maker.__version__}.js"
    script: str = read_cache(name).decode()
    if not script:
        script = maker.javascript_bundle(vl_version=vega_lite)
        with suppress(SplitcError):
            write_cache(name, script.encode())
    return script
