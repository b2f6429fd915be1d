"""Groups of options that commands share, and rules for options that need or exclude each other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from splitc.runtime.cli.help import print_help
from splitc.runtime.cli.terminal import out
from splitc.runtime.errors import MisuseError

Function = Callable[..., None]


@dataclass(frozen=True)
class Rule:
    """A rule for an option: it has an effect only with `needs`, or only without `bars`."""

    option: str
    needs: str | None = None
    bars: str | None = None
    why: str = ""


# For each command that has both options of a rule. Options of a split mode, of an engine or of a plan are elsewhere:
# the compiler's `request` and `building`.
RULES = (
    Rule("--baseline-threads", needs="--baseline"),
    Rule("--trust-external-data", needs="--baseline"),
    Rule("--fill", bars="--inputs", why="--fill makes up inputs, and --inputs gives them"),
    Rule("--shapes", bars="--inputs", why="--shapes is for inputs that are made up, and --inputs gives them"),
    Rule("--seed", bars="--inputs", why="--seed is for inputs that are made up, and --inputs gives them"),
    Rule("--prompt-chunk", bars="--prefill", why="--prefill reads the prompt at once"),
    Rule("--explain", bars="--json", why="--explain prints tables, and --json no table"),
    Rule("--report", bars="--rank", why="--rank lists files, and a page shows all the rest"),
    Rule("--hosts", bars="--device", why="both name the devices"),
    Rule("--prompt", bars="--prompt-ids", why="both give the prompt"),
    Rule("--audio", bars="--prompt", why="an encoder reads a sound or a text"),
    Rule("--audio", bars="--prompt-ids", why="an encoder reads a sound or a text"),
    Rule("--image", needs="--prompt"),
    Rule("--image", bars="--audio", why="a question is about a sound or an image"),
    Rule("--language", needs="--audio"),
    Rule("--task", needs="--audio"),
    *(Rule(option, needs="--temperature") for option in ("--top-k", "--top-p", "--seed")),
)


class Command(TyperCommand):
    """A command that refuses options that would have no effect, and whose help has topics and an example."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(out, self, ctx)

    def invoke(self, ctx: Any) -> Any:
        flags = {name: parameter for parameter in self.params for name in parameter.opts}
        for rule in RULES:
            other = rule.needs or rule.bars or ""
            if rule.option not in flags or other not in flags or not is_given(ctx, flags[rule.option].name):
                continue
            there = is_given(ctx, flags[other].name)
            if rule.needs and not there:
                raise MisuseError(f"{rule.option} has no effect without {rule.needs}")
            if rule.bars and there:
                raise MisuseError(f"{rule.option} and {rule.bars} together: {rule.why}. Leave out one of them")
        return super().invoke(ctx)


def is_given(context: Any, parameter: str | None) -> bool:
    """Whether the user gave a parameter of a command, even with its default value."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def with_options(name: str, make: Callable[..., Any]) -> Callable[[Function], Function]:
    """Add the options of `make` to a Typer command, which gets the result of `make` as its argument `name`."""

    def extend(command: Function) -> Function:
        options = inspect.signature(make).parameters
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            made = make(**{option: arguments.pop(option) for option in options})
            command(**{name: made}, **arguments)

        parameters = [*(parameter for parameter in own.values() if parameter.name != name), *options.values()]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # Typer reads it
        known = {**command.__annotations__, **make.__annotations__}
        run.__annotations__ = {parameter.name: known[parameter.name] for parameter in keywords}
        return run

    return extend
