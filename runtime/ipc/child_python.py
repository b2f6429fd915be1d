"""Python processes of our own."""

from __future__ import annotations

import sys


def python_command(program: str, *arguments: object) -> list[str]:
    """The command of a Python process that runs the program.

    It imports from where this process does: `python -m` would put the working folder first, whatever lies in it.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}", *map(str, arguments)]
