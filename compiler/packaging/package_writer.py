"""Write the files of a package. They are hashed while they are written, so that nothing is read again."""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from splitc.runtime.manifest import File

# Errors of os.link if a hard link is impossible: another file system, one without hard links, or too many links.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)
# Pieces that are written before their hash is taken.
AHEAD = 4


class HashedFile:
    """A file that is only appended to, with its size and hash, which `pool`, of one thread, takes meanwhile."""

    def __init__(self, file: BinaryIO, pool: Executor) -> None:
        self._file = file
        self._pool = pool
        self._digest = blake3()
        self._under_way: deque[Future[object]] = deque()
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        """Append the content, which must not change afterwards: its hash may be taken later."""
        view = memoryview(content).cast("B")
        self._under_way.append(self._pool.submit(self._digest.update, view))
        if len(self._under_way) > AHEAD:
            self._under_way.popleft().result()
        self._file.write(view)
        self.size += len(view)
        return len(view)

    @property
    def hash(self) -> str:
        """The BLAKE3 hash of the content so far, in hexadecimal."""
        while self._under_way:
            self._under_way.popleft().result()
        return self._digest.hexdigest()


class PackageWriter:
    """Writes into a folder that becomes a package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, File] = {}

    @property
    def files(self) -> list[File]:
        """The files written so far, sorted by path."""
        return [self._files[path] for path in sorted(self._files)]

    @contextmanager
    def open(self, path: Path) -> Iterator[HashedFile]:
        """Open a new file for writing."""
        with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
            hashed = HashedFile(file, pool)
            yield hashed
            self._files[path] = File(self._name(path), hashed.size, blake3=hashed.hash)

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file with this content."""
        with self.open(path) as file:
            file.write(content)

    def link(self, source: Path, target: Path) -> bool:
        """Make `target` a hard link to `source`, without a hash. If that is impossible, copy it and return False."""
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            with source.open("rb") as original, self.open(target) as copy:
                shutil.copyfileobj(original, copy, 1 << 20)
            return False
        self._files[target] = File(self._name(target), target.stat().st_size)
        return True

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()
