"""If MPI has started several processes of one program, process 0 goes on, and the others become its ranks."""

from __future__ import annotations

import sys
import threading
from functools import cache

from splitc.runtime.mpi.leaving import leave_at_exit, leave_signals
from splitc.runtime.mpi.world import World, find_world, started_by_mpi
from splitc.runtime.threads.interrupts import later_interrupts

# Threads of a program may open sessions at once. In a rank's process one of them serves, and the others wait.
_MEETING, _SERVING = threading.Lock(), threading.Lock()
_served = threading.Event()


def begin() -> World | None:
    """Go on in process 0 alone: the others are ranks of the sessions that it opens, and end with it.

    Returns None if MPI has not started several processes. Raises MisuseError if it started this one, and can't be used.
    """
    if not started_by_mpi():
        return None
    # MPI would wait for ever for a process that ends now, and leave its shared memory behind.
    with later_interrupts(), _MEETING:
        world = _meet()
    if world is not None and world.rank:
        from splitc.runtime.mpi.rank import serve

        with _SERVING:
            if not _served.is_set():
                _served.set()
                serve(world)
        sys.exit(0)
    return world


@cache
def _meet() -> World | None:
    if (world := find_world()) is not None:
        leave_at_exit(world) if world.rank == 0 else leave_signals(world)
    return world
