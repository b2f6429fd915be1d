"""The beginning of the command line, where MPI may have started several processes of it."""

from __future__ import annotations

from splitc.runtime.mpi.world import find_world


def begin() -> None:
    """Go on in process 0 alone: the others are ranks of the sessions that it opens, and end with it.

    Raises MisuseError if MPI started this process, and can't be used.
    """
    if (world := find_world()) is None:
        return
    if world.rank:
        from splitc.runtime.mpi.mpi_rank import serve

        serve(world)
    from splitc.runtime.mpi.leaving import leave_at_exit

    leave_at_exit(world)
