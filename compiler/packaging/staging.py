"""Write a folder beside its target, and rename it to the target when it is complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splitc.runtime import manifest as m
from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.units import format_bytes


def check_target(target: Path, force: bool) -> None:
    """Raise MisuseError unless a package may be written to `target`."""
    if target.exists() and not force:
        raise MisuseError(f"{target} exists already: choose another name, or replace it with --force")
    if target.exists() and not (target / m.FILE_NAME).exists():
        raise MisuseError(f"{target} exists and is no package, so --force does not replace it")
    if not target.absolute().parent.is_dir():
        raise MisuseError(f"there is no folder {target.absolute().parent} to write the package into")


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`. It replaces `target` if the block succeeds, and is removed if it fails."""
    parent = target.absolute().parent
    prefix = f".{target.name}.partial-"
    for left in parent.glob(f"{glob.escape(prefix)}*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        folder.chmod(0o755)
        yield folder
        replaced = folder.with_name(f"{folder.name}-replaced")
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def full_disk_explained(target: Path, needed: int) -> Iterator[None]:
    """Raise SplitcError if the disk has less than the `needed` bytes free, or if it gets full in the block."""
    parent = target.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SplitcError(
            f"the disk of {parent} has {format_bytes(free)} free, and the package needs {format_bytes(needed)}"
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SplitcError(
            f"the disk of {parent} is full: the package needs {format_bytes(needed)}. Nothing was written"
        ) from error
