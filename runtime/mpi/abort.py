"""How all processes end at once."""

from __future__ import annotations


def abort_all() -> None:
    """End all processes of all hosts, also those that hang. Does not return.

    MPI may end those of a communicator alone, and MPICH does: of a copy it waits for those on other hosts.
    """
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(1)
