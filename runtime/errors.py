"""Errors for users, each kind with the command line's exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Options that have another name in Python.
_OTHER_NAMES = {
    "d": "devices",
    "device": "devices",
    "set": "settings",
    "state": "states",
    "no-verify": "verify=False",
    "prompt-ids": "prompt",
}
_OPTION = re.compile(r"(?<![\w-])(?:--(?P<long>[a-z]+(?:-[a-z]+)*)|-(?P<short>d))(?![\w-])")
# Whether the user typed options, and so knows them by these names.
_are_typed = False


@contextmanager
def typed_options() -> Iterator[None]:
    """Errors name options as they are typed. Elsewhere they name the arguments of Python's functions."""
    global _are_typed
    before, _are_typed = _are_typed, True
    try:
        yield
    finally:
        _are_typed = before


def _in_python(option: re.Match[str]) -> str:
    name = option["long"] or option["short"]
    return _OTHER_NAMES.get(name, name.replace("-", "_"))


class SplitcError(Exception):
    """A failure that its message explains. The command line prints it without a traceback, and exits with 1.

    A message is written with the options of the command line. As text, it has those or Python's arguments.

    `page` is the page of the documentation, and its section, that helps; None if nothing is to be learned.
    """

    exit_code = 1
    page: str | None = "errors"

    def __str__(self) -> str:
        text = super().__str__()
        # Not to replace where nothing is to be: an error may say that there is no memory left.
        return text if _are_typed or "-" not in text else _OPTION.sub(_in_python, text)


class MisuseError(SplitcError):
    """The request itself is wrong: an unknown device, a shape for an unknown input."""

    exit_code = 2


class AdapterError(MisuseError):
    """An adapter that is missing or damaged, of an unknown kind, or for another model."""

    page = "adapters"


class DoesNotFitError(SplitcError):
    """The model does not fit the devices' memory."""

    exit_code = 3
    page = "planning#budgets"


class OutputsDifferError(SplitcError):
    """A package's outputs differ from the unsplit model's."""

    exit_code = 4
    page = "checking"


class PackageError(SplitcError):
    """A package is damaged, incomplete, or of a schema that this version can't read."""

    page = "package-format#the-package"


class EngineError(SplitcError):
    """An engine failed on a request: sizes do not fit together, or it ran out of memory."""

    page = "errors#while-a-session-runs"


class HandOverError(EngineError):
    """Only some ranks have a request, so that no rank can go on."""


class FollowingError(EngineError):
    """An engine gave up a request because another rank failed. That rank's error is the cause."""


class FeedError(MisuseError):
    """Feeds that do not fit the model: a missing or unknown name, a wrong number type, a wrong shape."""

    page = "checking#files-of-arrays"


class SizesError(FeedError, EngineError):
    """An engine failed on feeds that have two sizes where the model has one name for both."""


@contextmanager
def needed(said: str) -> Iterator[None]:
    """Raise MisuseError if a library can't be imported. `said` names who needs it."""
    try:
        yield
    except ImportError as error:
        raise MisuseError(f"{said} ({error})") from error


@contextmanager
def blamed(said: str) -> Iterator[None]:
    """Turn any error of a library into a MisuseError that begins with `said`.

    Errors of most libraries have no base of their own, and panics of those that are written in Rust derive from
    BaseException.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, SplitcError):
        raise
    except BaseException as error:
        raise MisuseError(f"{said}: {error}") from error


def named(error: SplitcError, module: str) -> SplitcError:
    """The error with the module's name before it."""
    renamed = type(error)(f"module '{module}': {error}")
    renamed.__cause__ = error
    return renamed


@contextmanager
def collected(errors: list[SplitcError]) -> Iterator[None]:
    """Keep the error of one module, and go on with the others."""
    try:
        yield
    except SplitcError as error:
        errors.append(error)


def raise_all(errors: Sequence[SplitcError]) -> None:
    """Raise the errors of several modules as one, of the kind of the first; do nothing if there are none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) from errors[0]
