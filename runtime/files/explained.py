"""System errors as errors for users."""

from __future__ import annotations

import errno
import shutil
import signal
import tempfile
from collections.abc import Iterator

from splitc.runtime.errors import SplitcError
from splitc.runtime.files.written import FULL
from splitc.runtime.units import format_bytes

# What Python says of it.
_NO_THREAD = "can't start new thread"


class Interrupted(SplitcError):
    """The user pressed Ctrl-C."""

    exit_code = 128 + signal.SIGINT
    page = None


def explained(error: BaseException) -> SplitcError | None:
    """The error for users; None if it is a bug of ours."""
    if isinstance(error, SplitcError):
        return error
    if any(isinstance(cause, KeyboardInterrupt) for cause in _chain(error)):  # libraries make other errors of it
        return Interrupted("interrupted")
    if isinstance(error, OSError):
        if error.errno in FULL and error.filename is None:
            folder = tempfile.gettempdir()
            free = format_bytes(shutil.disk_usage(folder).free)
            return SplitcError(
                f"{error.strerror}: where the output goes, or in {folder} ({free} free), where temporary files are"
            )
        if error.errno == errno.EMFILE:
            return SplitcError("this process may have no more open files: raise their limit (ulimit -n)")
        places = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return SplitcError(": ".join([*places, error.strerror or str(error) or type(error).__name__]))
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return SplitcError(
            "this process may start no more threads: raise the limit of processes (ulimit -u, or the container's), or "
            "give devices fewer threads with --threads"
        )
    if isinstance(error, MemoryError):
        return SplitcError(f"there is not enough memory on this machine: {error or 'an allocation failed'}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
