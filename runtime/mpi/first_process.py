"""If MPI has started several processes of one program, process 0 goes on, and the others become its ranks.

They end together.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from functools import cache

from splitc.runtime.mpi.life import abort_all
from splitc.runtime.mpi.messages import Leave, Left
from splitc.runtime.mpi.world import World, find_world, started_by_mpi
from splitc.runtime.processes.awake import AwakeClock
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


# Seconds (of this process being awake) within which the others must have ended, and between two checks. As long as
# everywhere, so that an error comes within 10.
PATIENCE, LOOK = 8.0, 0.5


def leave_at_exit(world: World) -> None:
    """Let the ranks' processes end when this program, that of the session, does.

    After its sessions, which are closed then, and are younger: the youngest ends first.
    """
    weakref.finalize(world, _leave, world)  # which keeps it until then


def leave_signals(world: World) -> None:
    """Leave signals to process 0: mpirun sends them to all processes, and process 0 ends the others."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: world.life.end_soon())


def _leave(world: World) -> None:
    """Tell all others to end. If a session broke, or one of them does not answer, all are ended at once."""
    with later_interrupts():
        _leave_together(world)


def _leave_together(world: World) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if world.broken.is_set():
        abort_all()
    for rank in range(1, world.size):
        world.control.send(rank, (Leave(), None))
    left, clock = 0, AwakeClock()
    while left < world.size - 1:
        arrived = world.control.receive(seconds=LOOK)
        if arrived is not None:
            left += isinstance(arrived[1][0], Left)
        elif clock.read() > PATIENCE:
            print("error: a rank does not end: all processes are aborted", file=sys.stderr, flush=True)
            abort_all()
    world.end()
