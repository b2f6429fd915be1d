"""Files that are written whole or not at all."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from splitc.runtime.errors import MisuseError


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` if the block ends well and is removed if it does not.

    What is there and is no regular file itself (a pipe, a terminal, a link such as /dev/stdout) is written to as it is.
    Raises MisuseError, naming the path and the reason, when it can't be written.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise MisuseError(f"there is no folder {folder} to write {path.name} into")
    try:
        if not _is_replaced(path):
            with path.open("wb") as file:
                yield file
            return
        # Several may write the same file at once, threads of one process too: each has a name of its own.
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
    """Whether a new file may take the place of what is there."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
