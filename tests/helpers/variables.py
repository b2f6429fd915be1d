"""The environment, as libraries in C read it."""

from __future__ import annotations

import ctypes


def read_variable(name: str) -> str | None:
    """The value of a variable; None if it is not set."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(name.encode())
    return None if value is None else value.decode()
