"""The user's cache folder: small files with measurements of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from splitc.runtime.errors import MisuseError
from splitc.runtime.files import written_whole


def cache_file(name: str) -> Path:
    """The path of a file in the cache."""
    return user_cache_path("splitc", appauthor=False) / name


def read_cache(name: str) -> bytes:
    """The file's content; empty if there is no such file."""
    path = cache_file(name)
    try:
        return path.read_bytes() if path.is_absolute() else b""
    except OSError:
        return b""


def write_cache(name: str, content: bytes) -> None:
    """Write the file atomically: other processes may read and write it at the same time.

    Raises MisuseError if it can't be written.
    """
    path = cache_file(name)
    try:
        if not path.is_absolute():  # of a user without a home, or where a variable says so: it would be a folder here
            raise MisuseError(f"{path} is no absolute path")
        with suppress(OSError):  # writing the file reports what is wrong with the folder
            path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(content)
    except MisuseError as error:
        raise MisuseError(
            f"measurements can't be kept for later: {error} (XDG_CACHE_HOME names a folder for them)"
        ) from error
