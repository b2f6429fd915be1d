"""End all processes of an MPI job at once."""

from __future__ import annotations

import sys
import time

# Seconds that mpirun gets to forward what was printed: what it has not read when the processes end is lost. A choice,
# and short beside the 10 s in which an error is promised.
PRINTING = 0.3


def abort_all() -> None:
    """End all processes of all hosts, also those that hang. Does not return.

    It aborts COMM_WORLD: for a copied communicator, MPICH waits for the processes on other hosts.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(PRINTING)

    MPI.COMM_WORLD.Abort(1)
