"""The command `splitc`, which is also `python -m splitc.runtime`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from splitc.runtime.cli.commands import app
from splitc.runtime.cli.terminal import run_app

# The compiler adds its commands when it is imported. It is imported by name, since the runtime must work without it.
COMPILER = "splitc.compiler"


def main() -> NoReturn:
    """Run the command line: the runtime's commands, and the compiler's if it is installed."""
    if find_spec(COMPILER) is not None:
        import_module(f"{COMPILER}.cli")
    run_app(app)


if __name__ == "__main__":
    main()
