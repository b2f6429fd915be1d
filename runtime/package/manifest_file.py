"""A package's manifest as a file: written with its own hash, and checked when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.json import Decoder

from splitc.runtime.errors import PackageError
from splitc.runtime.files.written import indented
from splitc.runtime.package.checks import find_contradiction
from splitc.runtime.package.manifest import READ, Manifest
from splitc.runtime.units import first_few

FILE_NAME = "manifest.json"
Sealed = TypeVar("Sealed")


class _Version(Struct, frozen=True):
    schema: int


# Made on import, here and elsewhere: msgspec crashes if several threads inspect a type for the first time at once.
_VERSIONS = Decoder(_Version)
_MANIFESTS = Decoder(Manifest)
# The beginning of a manifest: the SHA-256 of the file as it would be with zeros here.
_SEAL = re.compile(rb'\{\s*"sha256": "([0-9a-f]{64})"')
_UNSEALED = "0" * 64


def encode(manifest: Manifest) -> bytes:
    """The manifest as indented JSON with its own hash, the same bytes each time."""
    return seal(msgspec.json.encode(manifest))


def write_manifest(package: Path, manifest: Manifest) -> Manifest:
    """Write a package's manifest. Returns it with its hash, as it is read."""
    path = package / FILE_NAME
    path.unlink(missing_ok=True)  # it may be a hard link
    path.write_bytes(encode(manifest))
    return msgspec.structs.replace(manifest, sha256=read_seal(package))


def seal(content: bytes) -> bytes:
    """A manifest's JSON, indented, with its own hash."""
    fields = {"sha256": _UNSEALED, **{k: v for k, v in msgspec.json.decode(content).items() if k != "sha256"}}
    text = indented(fields)
    return text.replace(_UNSEALED.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def read_seal(package: Path) -> str:
    """The hash of a package's manifest, as stored in it. Raises PackageError if it can't be read."""
    try:
        _need_regular(package / FILE_NAME)
        with (package / FILE_NAME).open("rb") as file:
            match = _SEAL.match(file.read(200))
    except FileNotFoundError:
        raise PackageError(
            f"{package / FILE_NAME} is missing: the package is incomplete, copy all of it, or compile the model again"
        ) from None
    except OSError as error:
        raise PackageError(f"can't read {package / FILE_NAME}: {error.strerror}") from error
    if match is None:
        raise PackageError(f"{package / FILE_NAME} does not begin with its own hash: compile the model again")
    return match[1].decode()


def _need_regular(path: Path) -> None:
    """Raise PackageError unless it is a regular file: to read a pipe or a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise PackageError(f"{path} is no regular file: compile the model again")


def _is_sealed(text: bytes) -> bool:
    """Whether a manifest's content matches its own hash."""
    match = _SEAL.match(text)
    if match is None:
        return False
    unsealed = text[: match.start(1)] + _UNSEALED.encode() + text[match.end(1) :]
    return hashlib.sha256(unsealed).hexdigest().encode() == match[1]


def read_manifest(package: Path) -> Manifest:
    """Read a package's manifest. Raises PackageError if there is none, or one that this version can't read or trust."""
    path = package / FILE_NAME
    manifest = read_sealed(path, _MANIFESTS, READ)
    if manifest is None:
        raise PackageError(why_no_package(package))
    if (wrong := find_contradiction(manifest)) is not None:
        raise PackageError(f"{path} contradicts itself: {wrong}: compile the model again")
    return manifest


@contextlib.contextmanager
def same_package(package: Path, manifest: Manifest) -> Iterator[None]:
    """Raise PackageError if a package is replaced within the block, which may fail for that reason.

    Files are loaded by their paths. So some may be of the old package, and some of the new one.
    """
    try:
        yield
    except Exception:
        _check_same(package, manifest)  # its error says more, and has this one as its context
        raise
    _check_same(package, manifest)


def _check_same(package: Path, manifest: Manifest) -> None:
    """Raise PackageError unless a folder still has the package that this manifest was read from."""
    try:
        same = read_seal(package) == manifest.sha256
    except PackageError:
        same = False
    if not same:
        raise PackageError(f"{package} was replaced or removed since this session began to load it: open it again")


def why_no_package(path: Path) -> str:
    """What is at the path instead of a package, in words."""
    what = f"has no {FILE_NAME}, so it is no package" if path.is_dir() else "does not exist"
    what = "is a file, and packages are folders" if path.exists() and not path.is_dir() else what
    if inside := sorted(file.parent.name for file in path.glob(f"*/{FILE_NAME}")):
        return (
            f"{path} {what}, and these in it are: {first_few(inside)}. If they were compiled together, its "
            "pipeline.json is missing: copy all of the package"
        )
    return f"{path} {what}; make one with 'splitc compile'"


def read_sealed(path: Path, decoder: Decoder[Sealed], versions: Sequence[int]) -> Sealed | None:
    """Read a file that `seal` wrote; None if there is none. The last of the `versions` of its schema is the newest.

    Raises PackageError for a file that this version can't read or trust.
    """
    try:
        _need_regular(path)
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise PackageError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        # Check the version first, so that the error for a newer schema is not about a missing field.
        schema = _VERSIONS.decode(text).schema
        if schema not in versions:
            raise PackageError(
                f"{path} has schema version {schema}, and this splitc reads {_spoken(versions)}: "
                + ("upgrade splitc" if schema > versions[-1] else "compile the model again")
            )
        content = decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PackageError(f"{path} is damaged ({error}): compile the model again") from error
    if not _is_sealed(text):
        raise PackageError(f"{path} was changed since it was compiled (its SHA-256 differs): compile the model again")
    return content


def _spoken(versions: Sequence[int]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {' and '.join(map(str, versions))}"
