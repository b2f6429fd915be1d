"""The command `splitc`, which is also `python -m splitc`, and `python -m splitc.runtime`."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from splitc.runtime.threads.garbage import GARBAGE_AFTER
from splitc.runtime.threads.interrupts import handle_signals, later_interrupts


def main() -> NoReturn:
    """Run the command line: the runtime's commands, and the compiler's if it is installed."""
    handle_signals()
    try:
        with later_interrupts():  # processes of MPI end together, once they have met
            from splitc.runtime.files.explained import explained
            from splitc.runtime.mpi.first_process import begin

            gc.set_threshold(GARBAGE_AFTER)
            begin()
        # Imports take a while, in which a user may press Ctrl-C.
        from splitc.runtime.cli.app import app
        from splitc.runtime.cli.terminal import run_app

    except BaseException as error:
        if (known := explained(error)) is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        sys.exit(known.exit_code)
    run_app(app)


if __name__ == "__main__":
    main()
