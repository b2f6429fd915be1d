"""The user's cache folder: measurements of this machine, and what takes long to make."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.files.written import written_whole


def cache_file(name: str) -> Path:
    """The path of a file in the cache. Raises MisuseError for a user who has no home."""
    try:
        path = user_cache_path("splitc", appauthor=False) / name
    except RuntimeError as error:
        raise MisuseError(str(error)) from error
    if not path.is_absolute():  # by earlier versions of the library: it would be a folder named ~ wherever we are
        raise MisuseError(f"there is no home folder to write {path} to")
    return path


def read_cache(name: str) -> bytes:
    """The file's content; empty if there is no such file."""
    try:
        return cache_file(name).read_bytes()
    except (OSError, MisuseError):
        return b""


def write_cache(name: str, content: bytes) -> None:
    """Write the file atomically: other processes may read and write it at the same time.

    Raises MisuseError if it can't be written, and SplitcError if the disk is full.
    """
    try:
        path = cache_file(name)
        with suppress(OSError):  # writing the file reports what is wrong with the folder
            path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(content)
    except SplitcError as error:
        raise type(error)(
            f"measurements can't be kept for later: {error} (set XDG_CACHE_HOME to a folder for them)"
        ) from error
