"""Failures that are sent in place of values, so that no rank waits for ever."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from splitc.runtime.errors import HandOverError


@dataclass(frozen=True)
class Failure:
    """Stands for a value that could not be computed. It is sent to ranks that wait for the value."""

    error: BaseException


def attempt(work: Callable[[], Any]) -> Any:
    """The result of the work, or a Failure if it raises an error.

    Raises HandOverError: ranks have different requests, so no request can fail alone.
    """
    try:
        return work()
    except HandOverError:
        raise
    except Exception as error:  # any error belongs to the request
        clear_frames(error)
        return Failure(error)


def first_failure(values: Iterable[Any]) -> Failure | None:
    """The first Failure among values; None if there is none."""
    return next((value for value in values if isinstance(value, Failure)), None)


def clear_frames(error: BaseException | None) -> None:
    """Free the local variables of the error's frames.

    They refer to a device's memory and engines, which the device's thread must free, while the error may be kept
    anywhere.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
