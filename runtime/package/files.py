"""The files of a package, and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from blake3 import blake3

from splitc.runtime.package.manifest import File, Manifest

# The bytes that are hashed at a time, by BLAKE3 on several threads. A choice: on two cores any size
# from 1 MiB on is as fast (25 to 22 ms for 256 MiB); more threads want more at a time.
PIECE = 64 << 20


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    return _hash(path, hashlib.sha256(), lambda _: None)


def hash_package_file(path: Path, file: File, check: Callable[[int], None] = lambda _: None) -> str:
    """The hash of the file, in hexadecimal, by the manifest's hash function.

    `check` is called with the bytes of each piece before it is hashed. It may raise to stop.
    """
    digest = hashlib.sha256() if file.blake3 is None else blake3(max_threads=blake3.AUTO)
    return _hash(path, digest, check)


def _hash(path: Path, digest: Any, check: Callable[[int], None]) -> str:
    size = path.stat().st_size
    for start in range(0, size, PIECE):
        length = min(PIECE, size - start)
        check(length)
        # Each piece has its own map: touched pages count as memory of the process until the map is closed.
        digest.update(np.memmap(path, np.uint8, "r", start, (length,)))
    return str(digest.hexdigest())


def describe_files(package: Path, paths: Iterable[Path]) -> list[File]:
    """Manifest entries for files of the package."""
    return [_describe(package, path) for path in sorted(paths)]


def _describe(package: Path, path: Path) -> File:
    file = File(path.relative_to(package).as_posix(), path.stat().st_size, blake3="")
    return File(file.path, file.bytes, blake3=hash_package_file(path, file))


def files_of(manifest: Manifest, rank: int) -> list[File]:
    """The files that a rank needs: those in its engines' folders."""
    folders = {PurePosixPath(engine.path).parent for engine in manifest.ranks[rank].engines}
    return [file for file in manifest.files if PurePosixPath(file.path).parent in folders]
