"""Failures that travel in the place of values, so that nobody waits for what will not come."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """Stands for a value that was not computed, so that ranks further on are released rather than left to wait."""

    error: BaseException


def attempt(work: Callable[[], Any]) -> Any:
    """What the work returns; a Failure where it raises, for other ranks that wait for what comes of it."""
    try:
        return work()
    except Exception as error:  # whatever it is, it belongs to the request
        _clear_frames(error)
        return Failure(error)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames hold that the error came through: a device's memory, and its engines, belong to its thread,
    and the error goes wherever the caller takes it.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
