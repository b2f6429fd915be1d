"""What all commands share: consoles, tables, JSON output, and exit codes."""

from __future__ import annotations

import codecs
import gc
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from splitc.runtime.cli.pages import page_for
from splitc.runtime.errors import MisuseError, SplitcError, typed_options
from splitc.runtime.files.explained import Interrupted, explained
from splitc.runtime.units import VISIBLE, shortened, shortened_middle, visible

# The width of output to a file or another program.
WIDE = 200
# The usual columns of a terminal.
USUAL = 80
# Text columns shrink to this width before numbers are broken.
NARROWEST = 12
# The characters of a name that are always shown.
LEAST_WIDTH = 20


# For JSON, which itself escapes characters below 32.
_ESCAPED = {code: f"\\u{code:04x}" for code in VISIBLE if code > 32}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process, but a compile goes on

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


@contextmanager
def muted_stderr() -> Iterator[None]:
    """Drop what is written to the process's standard error: a library that panics prints a trace there.

    For the command line only: in another program it would drop other threads' messages too.
    """
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _console(*, stderr: bool) -> Console:
    # No markup and no emoji names: names of models, values and files may contain brackets and colons.
    make = partial(_Console, stderr=stderr, highlight=False, markup=False, emoji=False)
    console = make()
    return console if console.is_terminal else make(width=WIDE)


# Results go to standard output, everything else to standard error.
out = _console(stderr=False)
err = _console(stderr=True)


def fitted(name: str, width: int) -> str:
    """A name, shortened in the middle to `width` characters, but not below LEAST_WIDTH."""
    return shortened_middle(name, max(LEAST_WIDTH, width))


class _Fitted(Table):
    """A table whose columns share the width. Words, and above all numbers, are not broken if that is possible."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sizes = [
            [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            for column in self.columns
        ]
        widths = [max(size.maximum for size in column) for column in sizes]
        words = [max(size.minimum for size in column) for column in sizes]
        numbers = [column.no_wrap for column in self.columns]
        kept = [wide if number else word for number, wide, word in zip(numbers, widths, words, strict=True)]
        broken = [wide if number else min(wide, NARROWEST) for number, wide in zip(numbers, kept, strict=True)]
        if sum(kept) + 2 * len(kept) > options.max_width:
            self.padding = (0, 1, 0, 0)
        room = options.max_width - self.padding[1] * len(widths)
        for least in (kept, broken, words, [1] * len(widths)):
            while sum(widths) > room and (wider := [n for n, width in enumerate(widths) if width > least[n]]):
                widths[max(wider, key=widths.__getitem__)] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width, column.no_wrap = width, False
        yield from super().__rich_console__(console, options)


def is_narrow() -> bool:
    """Whether the terminal has fewer than 80 columns. Tables then leave out decoration."""
    return out.width < USUAL


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without frames. Columns named in `right` hold numbers. Text that is too wide is folded, never cut off."""
    result = _Fitted(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    for name in columns:
        number = name in right
        result.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return result


def print_table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], right: Sequence[str] = ()) -> None:
    """Print rows as a table: see `table`."""
    made = table(*columns, right=right)
    for row in rows:
        made.add_row(*row)
    out.print(made)


def print_json(result: Any) -> None:
    """Print a result as indented JSON on standard output."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    sys.stdout.buffer.write(text.translate(_ESCAPED).encode() + b"\n")


def print_output(text: str) -> None:
    """Print the user's own text unchanged; to a terminal, with visible characters only."""
    sys.stdout.write(visible(text) if out.is_terminal else text)
    sys.stdout.flush()


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    err.print(Text.assemble(("warning: ", "yellow"), (text, "bold")), soft_wrap=True)


# Substitutes for terminals that lack these characters.
PLAIN = {"\N{MICRO SIGN}": "u", "\N{MULTIPLICATION SIGN}": "x", "█": "#", "▓": "#", "▒": "=", "░": "-", "…": "..."}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a terminal's encoding lacks: see `codecs.register_error`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error("splitc.plain", _plain)


# Of wrong options: click's, or, in later versions, a copy of typer's own.
USAGE_ERROR: Any = typer.BadParameter.__base__


class UsageError(MisuseError):
    """An error of unreadable options. Its page is the command's help."""


def _value_of(error: Any) -> str:
    """The refused value, which later versions of Typer, with pydantic, leave out of the message."""
    errors = getattr(error.__context__, "errors", None)
    return f", not '{shortened(str(errors()[0]['input']))}'" if errors is not None else ""


def _in_our_words(error: Any) -> Exception:
    """The error of a wrong option or argument, in the form of all others. A call without arguments shows the help."""
    if not (message := error.format_message()) or type(error).__name__ == "NoArgsIsHelpError":
        return error  # type: ignore[no-any-return]
    message = message.replace(": Input should be", ": it should be")  # pydantic's; here an input is a model's
    usage = UsageError(message[0].lower() + message[1:].rstrip(".") + _value_of(error))
    # Not from the path of the command, which for `python -m splitc.runtime check` begins with three words.
    usage.page = error.ctx.info_name if error.ctx and error.ctx.parent else None
    return usage


class Commands(TyperGroup):
    """Commands that end with a SplitcError if the user or the system is the cause."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*args, **extra)
        except USAGE_ERROR as error:
            raise _in_our_words(error) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            raise _in_our_words(error) from error
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if (known := explained(error)) is None:
                raise
            raise known from error


def print_to_the_end(show: Callable[[], None]) -> None:
    """Print. If the reader of the output has ended, the command goes on, and drops its output."""
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_app(app: typer.Typer) -> NoReturn:
    """Run the command line. A SplitcError ends it with one message and its exit code, without a traceback."""
    sys.stdout, sys.stderr = map(_usable, (sys.stdout, sys.stderr))
    with typed_options():
        code = _run(app)
    gc.freeze()  # or Python would search all that is left for garbage as it ends
    sys.exit(code)  # type: ignore[arg-type]


def _run(app: typer.Typer) -> object:
    """Run the command line, print the error that ends it, and return its exit code."""
    code: object = 0
    try:
        try:
            app()
        except SystemExit as end:
            code = end.code
            if code == Interrupted.exit_code:  # typer ends without a word if that comes while it reads the options
                raise Interrupted("interrupted") from None
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (head, less) has ended
        _discard_output()
        code = 1
    except (SplitcError, OSError, KeyboardInterrupt) as error:
        known = explained(error)
        assert known is not None
        if isinstance(error, OSError):  # or Python would try again when it ends
            _discard_output()
        err.print(Text.assemble(("error: ", "bold red"), str(known)), soft_wrap=True)
        if (page := page_for(known, next(iter(sys.argv[1:]), None))) is not None:
            err.print(Text(f"see: splitc help {page}", "dim"), soft_wrap=True)
        code = known.exit_code
    return code


def _usable(stream: Any) -> TextIO:
    """The stream, set to accept all characters; a null stream in place of a closed one."""
    made: TextIO = Path(os.devnull).open("w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
    if isinstance(made, io.TextIOWrapper):
        made.reconfigure(errors="splitc.plain")
    return made
