"""A field of a request that is also a command line option, described as plain data for the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "option"


def as_given(value: Any) -> Any:
    """The value itself, for options that need no parsing."""
    return value


@dataclass(frozen=True)
class Option:
    """A field's command line option, of type `kind`.

    - `read`: parses the option's value to the field's.
    - `default`: the command line's default, before it is parsed.
    - `minimum`: the smallest number that it takes.
    - `only`: the split modes that it belongs to. `why` says what other modes do instead.
    - `ranged`: it belongs to engines that are built for sizes.
    - `planned`: its value in a PlanFile, or None if the file has no such value. Without `planned`, a plan leaves it
      open.
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
    """A dataclass field with its Option. `shown` is the command line's default if it differs from the field's."""
    metadata = {KEY: Option(flag, default if shown is None else shown, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)
