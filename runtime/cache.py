"""Small files that this machine keeps from run to run: what was measured on it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from splitc.runtime.files import written_whole


def cache_file(name: str) -> Path:
    """Where the file of this name is kept."""
    return user_cache_path("splitc", appauthor=False) / name


def read_cache(name: str) -> bytes:
    """What the file holds; nothing where it is not there."""
    try:
        return cache_file(name).read_bytes()
    except OSError:
        return b""


def write_cache(name: str, content: bytes) -> None:
    """Write the file, whole or not at all: other processes may read and write it at the same time.

    Raises MisuseError when it can't be written.
    """
    path = cache_file(name)
    with suppress(OSError):  # what is wrong with the folder is said when the file is written
        path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write(content)
