"""Python processes of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from subprocess import PIPE

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


def last_lines(commands: Sequence[Sequence[str]], what: Sequence[str], inherited: Sequence[int] = ()) -> list[str]:
    """The last lines that processes print, which run at once. None of them is left, whatever happens.

    Raises SplitcError if one fails: `what` it was to do, and the last line of its errors.
    """
    with ExitStack() as stack:
        running: list[subprocess.Popen[str]] = []
        for command in commands:
            started = subprocess.Popen(
                command, stdout=PIPE, stderr=PIPE, text=True, errors="replace", pass_fds=inherited
            )
            running.append(stack.enter_context(started))
            stack.callback(running[-1].kill)
        said = [process.communicate() for process in running]
    for process, (_, errors), doing in zip(running, said, what, strict=True):
        if process.returncode:
            raise SplitcError(f"can't {doing}: {(errors.strip().splitlines() or ['no message'])[-1]}")
    return [printed.splitlines()[-1] for printed, _ in said]
