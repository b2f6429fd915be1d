"""The command help."""

from __future__ import annotations

import typer
from rich.markdown import Markdown

from splitc.runtime.cli.help import WIDEST
from splitc.runtime.cli.pages import DOCS, read_page
from splitc.runtime.cli.shared_options import JSON
from splitc.runtime.cli.terminal import out, print_json, print_output, table


def help_command(
    topic: str | None = typer.Argument(
        None, metavar="TOPIC", help="A page, as in planning, or a section, as in planning#budgets. Default: list them."
    ),
    as_json: bool = JSON,
) -> None:
    """Show a page of the documentation."""
    if topic is None:
        texts = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
        pages = {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}
        if as_json:
            print_json(pages)
            return
        rows = table("topic", "page")
        for name, title in sorted(pages.items()):
            rows.add_row(name, title)
        out.print(rows)
        return
    text = read_page(topic)
    if as_json:
        print_json({"topic": topic, "text": text})
    elif out.is_terminal:
        out.print(Markdown(text), width=min(out.width, WIDEST))
    else:
        print_output(f"{text}\n")
