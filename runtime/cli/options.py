"""Share a group of options among commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Command = Callable[..., None]


def with_options(name: str, make: Callable[..., Any]) -> Callable[[Command], Command]:
    """Add the options of `make` to a Typer command, which gets the result of `make` as its argument `name`."""

    def extend(command: Command) -> Command:
        options = inspect.signature(make).parameters
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            made = make(**{each: arguments.pop(each) for each in options})
            command(**{name: made}, **arguments)

        parameters = [*(each for each in own.values() if each.name != name), *options.values()]
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # Typer reads it
        known = {**command.__annotations__, **make.__annotations__}
        run.__annotations__ = {each.name: known[each.name] for each in keywords}
        return run

    return extend
