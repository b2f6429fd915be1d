"""Shared by all commands: consoles, tables, JSON output, and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from splitc.runtime.errors import SplitcError

# The width of output to a file or another program.
WIDE = 200


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


# Results go to standard output, everything else to standard error.
out = _console(stderr=False)
err = _console(stderr=True)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without frames. Columns named in `right` hold numbers. Text that is too wide is folded, never cut off."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    for name in columns:
        number = name in right
        result.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return result


def print_json(result: Any) -> None:
    """Print a result as indented JSON on standard output."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    err.print(f"[yellow]warning:[/] [bold]{escape(text)}[/]", soft_wrap=True)


def run_app(app: typer.Typer) -> NoReturn:
    """Run the command line. A SplitcError ends it with one message and its exit code, without a traceback."""
    # A terminated compile must clean up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except SplitcError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output (head, less) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)
