"""A field of a request that a user gives on the command line too, as plain data: the command line makes its option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "option"


def as_given(value: Any) -> Any:
    """The value itself, for options that need no reading."""
    return value


@dataclass(frozen=True)
class Option:
    """A field's command line option, of type `kind`. `read` makes the field's value from what is given there.

    `default` is the command line's default, as text would give it. `minimum` is the smallest number that it takes.
    An option with `only` belongs to those split modes, and `why` says what others do instead. One that is `ranged`
    belongs to engines that are built for sizes. `planned` is what a PlanFile says of it, as the option gives it, or
    None if the file has no such thing; without `planned`, a plan leaves it open.
    """

    flag: str
    default: Any
    help: str
    kind: Any
    read: Callable[[Any], Any] = as_given
    minimum: int | None = None
    metavar: str | None = None
    only: Sequence[str] = ()
    why: str = ""
    ranged: bool = False
    planned: Callable[[Any], Any] | None = None


def request_field(default: Any, flag: str, *, shown: Any = None, **more: Any) -> Any:
    """A dataclass field with its Option. `shown` is the command line's default where it differs from the field's."""
    metadata = {KEY: Option(flag, default if shown is None else shown, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)
