"""Python processes of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import TextIO

from splitc.runtime.errors import FollowingError, MisuseError, SplitcError

# What Python prints before the message of such an error.
_FOLLOWED = f"{FollowingError.__module__}.{FollowingError.__qualname__}: "


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


def last_lines(commands: Sequence[Sequence[str]], what: Sequence[str], inherited: Sequence[int] = ()) -> list[str]:
    """The last lines that processes print, which run at once. None of them is left, whatever happens.

    Raises SplitcError if one fails: `what` it was to do, and the last line of its errors. Of several the first one that
    did not only follow another's failure.
    """
    with ExitStack() as stack:
        running = []
        for command in commands:
            # No pipes: a process that waits for another's value would not do so while that one waits for a reader.
            printed, errors = (stack.enter_context(TemporaryFile("w+", errors="replace")) for _ in range(2))
            process = subprocess.Popen(command, stdout=printed, stderr=errors, pass_fds=inherited)
            running.append((stack.enter_context(process), printed, errors))
            stack.callback(process.kill)
        failures = [
            f"can't {doing}: {_last_line(errors)}"
            for (process, _, errors), doing in zip(running, what, strict=True)
            if process.wait()
        ]
        if failures:
            raise SplitcError(min(failures, key=lambda said: _FOLLOWED in said))
        return [_last_line(printed) for _, printed, _ in running]


def _last_line(file: TextIO) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["no message"])[-1]
