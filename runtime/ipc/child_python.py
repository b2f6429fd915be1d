"""Python processes of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import TextIO

from splitc.runtime.errors import MisuseError, SplitcError


def python_command(imports: str, call: str, *arguments: object) -> list[str]:
    """The command of a Python process that runs the statements in `imports`, and then the `call`.

    Nothing of what is imported is garbage: to look for some meanwhile takes a tenth of a rank's start.
    It imports from where this process does: `python -m` would put the working folder first, whatever lies in it. Raises
    MisuseError in a program that embeds Python, and does not say where that is.
    """
    if not os.access(sys.executable or "", os.X_OK):
        raise MisuseError(
            f"splitc starts processes of Python, and sys.executable is {sys.executable!r}, which is no program: set it "
            "to Python's path. Ranks on CPU devices can also be threads (--ranks threads)"
        )
    program = f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; {imports}; gc.enable(); {call}"
    return [sys.executable, "-c", program, *map(str, arguments)]


def last_line(command: Sequence[str], what: str) -> str:
    """The last line that a process prints. It is not left, whatever happens.

    Raises SplitcError if it fails: `what` it was to do, and the last line of its errors.
    """
    # No pipes: the process would wait for this one to read what it prints.
    with TemporaryFile("w+", errors="replace") as printed, TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(command, stdout=printed, stderr=errors) as process:
            try:
                failed = process.wait()
            except BaseException:
                process.kill()
                raise
        if failed:
            raise SplitcError(f"can't {what}: {_last_line(errors)}")
        return _last_line(printed)


def _last_line(file: TextIO) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["no message"])[-1]
