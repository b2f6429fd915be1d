"""Files that are written whole or not at all, and never over what is read."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from splitc.runtime.errors import MisuseError


def check_output(path: Path, read: Iterable[Path]) -> None:
    """Raise MisuseError if a file can't be written to `path`, or if that is one of the files and folders `read`."""
    if not path.absolute().parent.is_dir():
        raise MisuseError(f"there is no folder {path.absolute().parent} to write {path.name} into")
    if path.is_dir():
        raise MisuseError(f"can't write {path}: it is a folder")
    place = path.resolve()
    for each in read:
        if place == (other := each.resolve()) or (other.is_dir() and other in place.parents):
            what = "which is read" if other == place else f"in {each}, which is read"
            raise MisuseError(f"{path} would be written over, {what}: choose another name")


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, which replaces `path` if the block succeeds, and is removed if it fails.

    If `path` is not a regular file (a pipe, a terminal, a link such as /dev/stdout), it is written to directly. Raises
    MisuseError, which names the path and the reason, if it can't be written.
    """
    check_output(path, ())
    try:
        if not _is_replaced(path):
            with path.open("wb") as file:
                yield file
            return
        # A random name, since several threads or processes may write the same file at once.
        aside = path.with_name(f".splitc-{secrets.token_hex(8)}")
        try:
            with aside.open("xb") as file:
                yield file
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MisuseError(f"can't write {path}: {error.strerror or error}") from error


def _is_replaced(path: Path) -> bool:
    """Whether a new file may replace `path`: if it is a regular file or does not exist."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
