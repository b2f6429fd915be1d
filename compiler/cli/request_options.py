"""The options of plan and compile that are fields of a Request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from splitc.compiler.modes.table import FALLBACKS, describe_modes, known_modes
from splitc.compiler.request.option import Option
from splitc.compiler.request.request import OBJECTIVES, Request, options_of_requests
from splitc.runtime.cli import completion
from splitc.runtime.cli.completion import one_of
from splitc.runtime.engines.kinds import KINDS

COMPLETERS: Mapping[str, Callable[..., Any]] = {
    "split_mode": one_of(known_modes()),
    "fallback": one_of(FALLBACKS),
    "objective": one_of(OBJECTIVES),
    "main_device": completion.devices,
    "engine": one_of(KINDS.keys()),
}
# Help that a field can't contain: the modes are in a table of their own.
HELP: Mapping[str, str] = {"split_mode": describe_modes()}


def request_reader() -> Callable[..., Request]:
    """A function that makes a Request of the options, as keyword arguments named like the fields.

    Typer reads its signature.
    """
    options = options_of_requests()

    def read(**given: Any) -> Request:
        return Request(**{name: option.read(given[name]) for name, option in options.items()})

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_typer(name, option), annotation=option.kind)
        for name, option in options.items()
    ]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    read.__annotations__ = {name: option.kind for name, option in options.items()}
    return read


def _typer(name: str, option: Option) -> Any:
    """Typer's parameter for a field's option."""
    return typer.Option(
        option.default,
        option.flag,
        help=HELP.get(name, option.help),
        min=option.minimum,
        metavar=option.metavar,
        autocompletion=COMPLETERS.get(name),
    )
