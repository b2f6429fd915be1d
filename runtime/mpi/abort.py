"""How all processes end at once."""

from __future__ import annotations

import sys
import time

# Seconds in which mpirun passes on what was printed. What it has not read when all are ended is lost, errors too.
PRINTING = 0.3


def abort_all() -> None:
    """End all processes of all hosts, also those that hang. Does not return.

    MPI may end those of a communicator alone, and MPICH does: of a copy it waits for those on other hosts.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(PRINTING)

    MPI.COMM_WORLD.Abort(1)
