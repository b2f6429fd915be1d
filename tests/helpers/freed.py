"""The Python code that runs as objects are freed, where Python drops the exception of a signal."""

from __future__ import annotations

import sys
from types import FrameType


def code_as_freed(held: list[object]) -> list[str]:
    """The names of the Python functions that run as the list's objects are freed."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    return called
