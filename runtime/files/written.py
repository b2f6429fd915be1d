"""Files that are written atomically, and never over what is read; checks of files that are read."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.units import format_bytes, shortened

# The most bytes of a file that is read whole. A choice: plans, settings and prompts are far smaller, and a file that is
# larger by mistake would fill the memory.
MOST_BYTES = 1 << 30
# Errors where a hard link is impossible: to another file system, on one without links, or one link too many.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
# The errors of a full disk and of a full quota.
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_regular(path: Path) -> None:
    """Raise MisuseError unless the path leads to a regular file of at most MOST_BYTES: a pipe may never end."""
    try:
        status = path.stat()
    except OSError as error:
        raise MisuseError(f"can't read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise MisuseError(f"can't read {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    if status.st_size > MOST_BYTES:
        size, most = format_bytes(status.st_size), format_bytes(MOST_BYTES)
        raise MisuseError(f"can't read {path}: it has {size}, and such files have {most} at most")


def parse_json(content: bytes, what: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON in any of its encodings. `pairs` makes its objects. Raises MisuseError, which begins with `what`."""
    try:
        return json.loads(content, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{what}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises MisuseError for a file that can't be read, or has something else in it."""
    check_regular(path)
    try:
        content = parse_json(path.read_bytes(), f"{path} is no JSON")
    except OSError as error:
        raise MisuseError(f"can't read {path}: {error.strerror}") from error
    if not isinstance(content, dict):
        raise MisuseError(f'{path} should be a JSON object ({{"name": value}}): it is {shortened(json.dumps(content))}')
    return content


def indented(value: Any) -> bytes:
    """A value as JSON that people read and edit, with a line end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def try_link(source: str | Path, target: str | Path) -> bool:
    """Make `target`, which must not be there, a hard link to the file. False where the disk has no such links.

    Raises OSError for anything else.
    """
    try:
        os.link(Path(source).resolve(), target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return False
    return True


def link_file(source: str | Path, target: str | Path) -> None:
    """As `try_link`, or copy the file if it can't be linked."""
    if not try_link(source, target):
        shutil.copyfile(source, target)


def check_output(path: Path, read: Iterable[Path]) -> None:
    """Raise MisuseError if a file can't be written to `path`, or if that is one of the files and folders `read`."""
    try:
        if not path.absolute().parent.is_dir():
            raise MisuseError(f"there is no folder {path.absolute().parent} to write {path.name} into")
        if path.is_dir():
            raise MisuseError(f"can't write {path}: it is a folder")
    except PermissionError as error:  # a folder on the way that may not be looked into
        raise MisuseError(f"can't write {path}: {error.strerror}") from error
    check_not_read(path, read)


def check_not_read(path: Path, read: Iterable[Path]) -> None:
    """Raise MisuseError if a file or folder to write is one of those that are `read`, or in such a folder."""
    place = Path(os.path.realpath(path))  # unlike resolve(), it accepts circular links
    for source in read:
        other = Path(os.path.realpath(source))
        if place == other or (other.is_dir() and other in place.parents):
            what = f"written into {source}" if other.is_dir() else "overwritten"
            raise MisuseError(f"{path} would be {what}, which is read: choose another name")


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, which replaces `path` if the block succeeds, and is removed if it fails.

    If `path` is not a regular file (a pipe, a terminal, a link such as /dev/stdout), it gets the content at the end:
    the block may move in the file, as a ZIP file's writer does. Raises MisuseError, with the path and the reason, if it
    can't be written; SplitcError if the disk is full.
    """
    check_output(path, ())
    try:
        if not is_replaced(path):
            with tempfile.TemporaryFile() as made:
                yield made
                made.seek(0)
                with path.open("wb") as file:
                    shutil.copyfileobj(made, file)
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
        if error.errno in FULL:
            free = format_bytes(shutil.disk_usage(path.absolute().parent).free)
            raise SplitcError(f"can't write {path}: the disk is full ({error.strerror}), with {free} free") from error
        raise MisuseError(f"can't write {path}: {error.strerror or error}") from error


def is_replaced(path: Path) -> bool:
    """Whether a new file may replace `path`: if it is a regular file or does not exist."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
