"""Where MPI may have started several processes of one program: process 0 goes on, the others are its ranks."""

from __future__ import annotations

from splitc.runtime.mpi.world import World, find_world


def begin() -> World | None:
    """Go on in process 0 alone: the others are ranks of the sessions that it opens, and end with it.

    Returns None if MPI has not started several processes. Raises MisuseError if it started this one, and can't be used.
    """
    if (world := find_world()) is None:
        return None
    if world.rank:
        from splitc.runtime.mpi.mpi_rank import serve

        serve(world)
    from splitc.runtime.mpi.leaving import leave_at_exit

    leave_at_exit(world)
    return world
