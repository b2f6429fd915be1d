"""Write a folder beside its target, and rename it to the target when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import FULL
from splitc.runtime.threads.interrupts import later_interrupts

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def written_folder(target: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """A new folder beside `target`. It becomes `target` if the block succeeds, and is removed if it fails.

    `check` raises an error unless it may be written to `target`, before and after. What a killed process left of it is
    removed first, and what it left half replaced is restored. Raises MisuseError if another process writes to the same
    target.
    """
    target = target.resolve()
    folder, replaced = (target.with_name(f".{target.name}.{what}") for what in ("partial", "replaced"))
    with _locked(folder, target):
        try:
            _restore(target, replaced)
            check(target)
            yield folder
            check(target)
            with later_interrupts():  # an interrupt while the old one is removed would leave half of it
                _put(folder, target, replaced)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _put(folder: Path, target: Path, replaced: Path) -> None:
    """Rename a folder to the target, and replace what is there."""
    try:
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
    except BaseException:
        _restore(target, replaced)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _restore(target: Path, replaced: Path) -> None:
    """Move a replaced folder back, unless another one is in its place."""
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether an open folder still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Create the empty folder, locked for this process."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(exist_ok=True)
            if fcntl:
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(folder, descriptor):  # who had the lock has renamed it, and another may write a new one
                    raise BlockingIOError
            for left in folder.iterdir():  # by a process that was killed
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except BlockingIOError:
            raise MisuseError(f"another process is writing {target}: wait for it, or choose another name") from None
        except OSError as error:
            if error.errno in FULL:
                raise
            raise MisuseError(f"can't write {target}: {error.strerror}") from error
        yield
