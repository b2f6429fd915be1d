"""Writes the files of a package, and hashes them while they are written, so that nothing is read again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from splitc.runtime.errors import SplitcError
from splitc.runtime.files.written import try_link
from splitc.runtime.package.manifest import File

# The bytes that are written at a time. For larger writes Linux takes larger blocks of its page cache. A virtual machine
# has often returned these to its host, and writing takes two to four times as long while it gets them back. From Linux
# 6.18 on, it maps the whole block around a byte that is read (see MAPPED_AROUND).
WRITE = 1 << 16


class HashedFile:
    """A file that is only appended to, with its size and hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake3()
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        """Hash and write the content."""
        view = memoryview(content).cast("B")
        self._digest.update(view)
        for start in range(0, len(view), WRITE):
            self._file.write(view[start : start + WRITE])
        self.size += len(view)
        return len(view)

    @property
    def hash(self) -> str:
        """The BLAKE3 hash of the content so far, in hexadecimal."""
        return self._digest.hexdigest()


class PackageWriter:
    """Writes into a folder that becomes a package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, File] = {}
        self._stopped = False

    @property
    def files(self) -> list[File]:
        """The files written so far, sorted by path."""
        return [self._files[path] for path in sorted(self._files)]

    @contextmanager
    def open(self, path: Path) -> Iterator[HashedFile]:
        """Open a new file for writing."""
        with path.open("wb") as file:
            hashed = HashedFile(file)
            yield hashed
        self._files[path] = File(self._name(path), hashed.size, blake3=hashed.hash)

    def stop(self) -> None:
        """Let writing threads end soon."""
        self._stopped = True

    def check_stopped(self) -> None:
        """Raise SplitcError after `stop`."""
        if self._stopped:
            raise SplitcError("writing the package was stopped")

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file with this content."""
        with self.open(path) as file:
            file.write(content)

    def copy(self, source: Path, target: Path) -> None:
        """Write a new file with the content of another."""
        with source.open("rb") as original, self.open(target) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)

    def link(self, source: Path, target: Path) -> bool:
        """Make `target` a hard link to `source`, without a hash. If that is impossible, copy it and return False."""
        if not try_link(source, target):
            self.copy(source, target)
            return False
        status = target.stat()
        self._files[target] = File(self._name(target), status.st_size, inode=status.st_ino, modified=status.st_mtime_ns)
        return True

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()
