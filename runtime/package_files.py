"""The files of a package: hash them, and verify them against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from splitc.runtime.errors import PackageError
from splitc.runtime.manifest import File, Manifest


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(package: Path, paths: Iterable[Path], links: Iterable[Path] = ()) -> list[File]:
    """Manifest entries for files of the package. They are hashed in parallel, which releases Python's global lock."""
    ordered, unread = sorted(paths), frozenset(links)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(lambda path: None if path in unread else hash_file(path), ordered))
    return [
        File(path.relative_to(package).as_posix(), path.stat().st_size, digest)
        for path, digest in zip(ordered, hashes, strict=True)
    ]


def files_of(manifest: Manifest, rank: int) -> list[File]:
    """The files that a rank needs: those in the folders of its engines."""
    folders = {PurePosixPath(engine.path).parent for engine in manifest.ranks[rank].engines}
    return [file for file in manifest.files if PurePosixPath(file.path).parent in folders]


def verify_files(package: Path, files: Iterable[File]) -> None:
    """Compare the package's files with the manifest. Raises PackageError, which says which file differs and how."""

    def verify(file: File) -> None:
        path = package / file.path
        if not path.is_file():
            raise PackageError(f"{path} is missing: the package is incomplete, compile the model again")
        size = path.stat().st_size
        if size != file.bytes:
            raise PackageError(f"{path} has {size:,} bytes, its manifest says {file.bytes:,}: compile the model again")
        if file.sha256 is not None and hash_file(path) != file.sha256:
            raise PackageError(f"{path} was changed since it was compiled (its SHA-256 differs from the manifest's)")

    with ThreadPoolExecutor() as pool:
        list(pool.map(verify, files))
