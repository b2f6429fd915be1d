"""Where MPI may have started several processes of one program: process 0 goes on, the others are its ranks."""

from __future__ import annotations

from functools import cache

from splitc.runtime.mpi.leaving import leave_at_exit, leave_signals
from splitc.runtime.mpi.world import World, find_world, started_by_mpi
from splitc.runtime.threads.interrupts import ended_by_signals


def begin() -> World | None:
    """Go on in process 0 alone: the others are ranks of the sessions that it opens, and end with it.

    Returns None if MPI has not started several processes. Raises MisuseError if it started this one, and can't be used.
    """
    return _meet() if started_by_mpi() else None


@cache
def _meet() -> World | None:
    # A signal that comes to all may end one of them before it meets the others. Those then wait in MPI for good, where
    # Python does not get to handle theirs.
    with ended_by_signals():
        if (world := find_world()) is None:
            return None
        leave_at_exit(world) if world.rank == 0 else leave_signals(world)
        world.communicator.Barrier()  # only now is no process ended by a signal but by process 0
    if world.rank:
        from splitc.runtime.mpi.mpi_rank import serve

        serve(world)
    return world
