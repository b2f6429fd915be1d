"""The command help."""

from __future__ import annotations

from typing import Any

import typer
from rich.markdown import Markdown

from splitc.runtime.cli.help import WIDEST, print_help
from splitc.runtime.cli.pages import page_files, read_page, section_names
from splitc.runtime.cli.shared_options import JSON
from splitc.runtime.cli.terminal import out, print_json, print_output, print_table


def _topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The commands, the pages of the documentation, and the sections of the page that is typed."""
    page, mark, _ = incomplete.partition("#")
    if mark and page in page_files():
        return [f"{page}#{section}" for section in section_names(page)]
    commands: Any = ctx.parent and ctx.parent.command
    return [*commands.list_commands(ctx.parent), *page_files()]


def help_command(
    context: typer.Context,
    topic: str | None = typer.Argument(
        None,
        metavar="[TOPIC]",
        help="A command; a page, as in planning; or a section, as in planning#budgets. Default: list them.",
        autocompletion=_topics,
    ),
    as_json: bool = JSON,
) -> None:
    """Show the help of a command, or a page of the documentation."""
    if topic is None:
        _list_pages(context, as_json)
        return
    assert context.parent is not None
    parent: Any = context.parent.command
    if topic in parent.list_commands(context.parent):
        command = parent.get_command(context.parent, topic)
        own = type(context)(command, info_name=topic, parent=context.parent)
        if as_json:
            with out.capture() as printed:
                print_help(out, command, own)
            print_json({"topic": topic, "text": printed.get()})
        else:
            print_help(out, command, own)
        return
    text = read_page(topic)
    if as_json:
        print_json({"topic": topic, "text": text})
    elif out.is_terminal:
        out.print(Markdown(text), width=min(out.width, WIDEST))
    else:
        print_output(f"{text}\n")


def _list_pages(context: typer.Context, as_json: bool) -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in page_files().items()}
    pages = {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}
    if as_json:
        print_json(pages)
        return
    assert context.parent is not None
    context.parent.get_help()  # which prints it
    out.print()
    print_table(("topic", "splitc help TOPIC shows the page"), pages.items())
