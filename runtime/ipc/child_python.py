"""Python processes of our own."""

from __future__ import annotations

import sys


def python_command(imports: str, call: str, *arguments: object) -> list[str]:
    """The command of a Python process that runs the statements in `imports`, and then the `call`.

    Nothing of what is imported is garbage: to look for some meanwhile takes a tenth of a rank's start.
    It imports from where this process does: `python -m` would put the working folder first, whatever lies in it.
    """
    program = f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; {imports}; gc.enable(); {call}"
    return [sys.executable, "-c", program, *map(str, arguments)]
