"""Compare a package's files with its manifest before they are used.

A file that was compared is not read again while its size and times are the same. That is noted in the package's folder,
so that other machines and containers with this folder know it, or in the user's cache if the folder can't be written.
Files that are copied have new times (nobody can set a file's ctime).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from splitc.runtime.errors import MisuseError, PackageError, SplitcError
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.files.written import check_regular, is_replaced, written_whole
from splitc.runtime.package.files import hash_package_file
from splitc.runtime.package.manifest import File, Manifest
from splitc.runtime.threads.futures import Executor
from splitc.runtime.threads.progress import Bytes, counting

ALWAYS, ONCE, NEVER = WORDS = ("always", "once", "never")
# The file of what was compared, in the package's folder.
STAMP = "verified.json"
# A file's path in the package, its size and times in nanoseconds, and its hash. Not its inode and device, which change
# when a volume is mounted again.
Known = tuple[str, int, int, int, str]

_writing = threading.Lock()


def check_word(verify: str) -> None:
    """Raise MisuseError unless `verify` is a word for how often files are compared."""
    if verify not in WORDS:
        raise MisuseError(f"--verify is {', '.join(map(repr, WORDS))}, not {verify!r}")


def verify_files(package: Path, files: Iterable[File], verify: str = ALWAYS) -> None:
    """Compare files with the manifest. Raises PackageError, which says which file differs and how."""
    verification = Verification(package, files, verify)
    try:
        verification.begin()
        verification.finish()
    finally:
        verification.stop()


def check_unread(package: Path, file: File) -> None:
    """Raise PackageError if a file of the package is missing, or of another size than its manifest says.

    Also if it is a link to the model's data, which was written in place since. A copy of it has another inode.
    """
    path = package / file.path
    if not path.is_file():
        raise PackageError(f"{path} is missing: the package is incomplete, compile the model again")
    status = path.stat()
    if status.st_size != file.bytes:
        raise PackageError(
            f"{path} has {status.st_size:,} bytes, its manifest says {file.bytes:,}: compile the model again"
        )
    if file.inode == status.st_ino and file.modified != status.st_mtime_ns:
        raise PackageError(
            f"{path} is a link to the model's data, which was written to since it was compiled: compile the model again"
        )


class Verification:
    """Compares a package's files with the manifest, on its own thread, from `begin` until `finish` or `stop`.

    Raises PackageError, which says which file differs and how. Files that are missing or of another size are reported
    first.
    """

    def __init__(self, package: Path, files: Iterable[File], verify: str, first: Iterable[str] = ()) -> None:
        self._package = package
        self._stopped = False
        self._known = {*_read_stamp(package), *_read_cache(package)} if verify == ONCE else set[Known]()
        self._found: list[Known] = []
        self._remembers = verify == ONCE
        paths, listed = frozenset(first), list(files) if verify != NEVER else []
        for file in listed:
            check_unread(package, file)
        self._count = counting("comparing hashes", Bytes(sum(file.bytes for file, _ in self._unknown(listed))))
        self._first = [file for file in listed if file.path in paths]
        self._others = [file for file in listed if file.path not in paths]
        self._pool = Executor(1, "splitc verifies")

    def begin(self) -> None:
        """Compare the files that must be first, and start on the others."""
        self._verify(self._first)
        self._rest = self._pool.submit(self._verify, self._others)

    def finish(self) -> None:
        """Wait until all files are compared. Raises PackageError for one that differs."""
        self._rest.result()
        self.stop()

    def stop(self) -> None:
        """End it early, or after `finish`. Files compared so far are remembered."""
        self._stopped = True
        self._pool.shutdown()
        if self._remembers and self._found:
            _remember(self._package, self._found)

    def _verify(self, files: Sequence[File]) -> None:
        for file, known in self._unknown(files):
            path = self._package / file.path
            if hash_package_file(path, file, self._check_stopped) != file.hash:
                raise PackageError(f"{path} was changed since it was compiled (its hash differs from the manifest's)")
            self._found.append(known)

    def _unknown(self, files: Iterable[File]) -> Iterator[tuple[File, Known]]:
        """The files with a hash that are not known to match it, as they are now."""
        for file in files:
            if file.hash is not None:
                status = (self._package / file.path).stat()
                known = (file.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, file.hash)
                if known not in self._known:
                    yield file, known

    def _check_stopped(self, count: int) -> None:
        self._count(count)
        if self._stopped:
            raise SplitcError("comparing the files' hashes was interrupted")


def _read_stamp(package: Path) -> list[Known]:
    path = package / STAMP
    try:
        check_regular(path)
        return _decode(path.read_bytes())
    except (OSError, MisuseError):
        return []


def _read_cache(package: Path) -> list[Known]:
    return _decode(read_cache(_cached_as(package)))


def _cached_as(package: Path) -> str:
    """The name of the cache's file for this folder."""
    return f"verified-{hashlib.sha256(bytes(package.resolve())).hexdigest()[:16]}.json"


def _decode(content: bytes) -> list[Known]:
    try:
        return msgspec.json.decode(content, type=list[Known])
    except msgspec.DecodeError:
        return []


def _remember(package: Path, compared: Sequence[Known]) -> None:
    """Add to the record of compared files, which another process may have extended meanwhile."""
    paths = {path for path, *_ in compared}

    def with_found(known: Iterable[Known]) -> bytes:
        return msgspec.json.encode([*(entry for entry in known if entry[0] not in paths), *compared])

    with _writing:
        try:
            if not is_replaced(package / STAMP):
                raise MisuseError(f"{package / STAMP} is a link or a pipe")
            with written_whole(package / STAMP) as file:
                file.write(with_found(_read_stamp(package)))
        except (OSError, SplitcError):
            with suppress(SplitcError):  # where nothing can be kept, files are compared each time
                write_cache(_cached_as(package), with_found(_read_cache(package)))


def engine_files(manifest: Manifest) -> list[str]:
    """The paths of engines and their sources, to compare before they are loaded."""
    return [path for engine in manifest.engines for path in (engine.path, engine.source) if path is not None]
