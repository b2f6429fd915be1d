"""Where a package may be written to: what it may replace, and whether there is room."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.files.written import FULL
from splitc.runtime.files.written_folder import written_folder
from splitc.runtime.package.manifest_file import FILE_NAME
from splitc.runtime.package.pipeline_file import FILE_NAME as PIPELINE
from splitc.runtime.package.verification import STAMP
from splitc.runtime.units import format_bytes

# How a package comes to its weights: its own copy, or hard links to the model's data.
WEIGHTS = ("copy", "link")


def check_weights(weights: str) -> None:
    """Raise MisuseError unless this is one of WEIGHTS."""
    if weights not in WEIGHTS:
        raise MisuseError(f"unknown --weights '{weights}': there are {', '.join(WEIGHTS)}")


def check_target(target: Path, force: bool) -> None:
    """Raise MisuseError unless a package may be written to `target`.

    With `force`, a package that splitc wrote may exist there, if nothing else is in its folder.
    """
    _folder_of(target)
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        raise MisuseError(f"{target} is a link, to {target.readlink()}: name the folder that the package goes to")
    if not force:
        raise MisuseError(f"{target} exists already: choose another name, or replace it with --force")
    if (foreign := _foreign(target)) is not None:
        raise MisuseError(f"{target} {foreign}, so --force does not replace it: choose another name, or remove it")


def _folder_of(target: Path) -> Path:
    """The parent folder of a package. Raises MisuseError if it does not exist."""
    parent = target.absolute().parent
    if not parent.is_dir():
        raise MisuseError(f"there is no folder {parent} to write the package into")
    return parent


class _Listed(msgspec.Struct):
    path: str


class _Named(msgspec.Struct):
    name: str


class _Contents(msgspec.Struct):
    """The fields that files of packages have in all versions: manifests `splitc`, and those of pipelines `modules`."""

    files: list[_Listed]
    splitc: str | None = None
    modules: list[_Named] | None = None


def _foreign(target: Path) -> str | None:
    """Why a folder must not be replaced: it is no package, or has other files in it. None if it may be."""
    if not target.is_dir():
        return "is a file"
    try:
        ours = _listed(target / (PIPELINE if (target / PIPELINE).exists() else FILE_NAME))
    except (OSError, msgspec.DecodeError):
        return "is no package"
    ours |= {parent for path in ours for parent in path.parents}
    others = (path for path in target.rglob("*") if path.is_symlink() or path not in ours)
    other = next(others, None)
    return None if other is None else f"has {other.relative_to(target)} in it, which is not the package's"


def _listed(path: Path) -> set[Path]:
    """The files that a manifest lists, or a pipeline's file with its modules. Raises OSError or DecodeError else."""
    contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    if (contents.splitc if path.name == FILE_NAME else contents.modules) is None:
        raise msgspec.ValidationError(f"{path} is another program's")
    folder, modules = path.parent, contents.modules or ()
    own = {path, folder / STAMP, *(folder / file.path for file in contents.files)}
    return own.union(*(_listed(folder / module.name / FILE_NAME) for module in modules))


def written_aside(target: Path, replace: bool) -> contextlib.AbstractContextManager[Path]:
    """A new folder beside `target`, which becomes it: see `written_folder`. A package may be there to `replace`."""
    return written_folder(target, partial(check_target, force=replace))


def check_disk_space(target: Path, needed: int) -> int:
    """The bytes that are free on the target's disk. Raises SplitcError if they are fewer than `needed`."""
    free = shutil.disk_usage(_folder_of(target)).free
    if free < needed:
        raise SplitcError(
            f"can't write {target}: its disk has {format_bytes(free)} free, and the package's weights alone take "
            f"{format_bytes(needed)}"
        )
    return free


@contextlib.contextmanager
def full_disk_explained(target: Path, needed: int) -> Iterator[None]:
    """Raise SplitcError if the disk has fewer than `needed` bytes free, or if it gets full in the block.

    Raises MisuseError if the folder does not exist.
    """
    free = check_disk_space(target, needed)
    weights = f", and the package's weights alone take {format_bytes(needed)}" if needed else ""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise SplitcError(
                f"can't write {target}: its disk is full ({error.strerror}). It had {format_bytes(free)} "
                f"free{weights}. Nothing was written"
            ) from error
        if error.filename is None:  # a write, which the system does not name
            raise SplitcError(f"can't write {target}: {error.strerror or error}. Nothing was written") from error
        raise
