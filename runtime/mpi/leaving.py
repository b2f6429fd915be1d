"""How the processes that MPI has started end together."""

from __future__ import annotations

import atexit
import sys
import time

from splitc.runtime.mpi.joining import Leave, Left
from splitc.runtime.mpi.world import World

# Seconds in which the others must have ended.
PATIENCE = 8.0
_leaving: list[World] = []


def leave_at_exit(world: World) -> None:
    """Let the ranks' processes end when this program, that of the session, does."""
    if not _leaving:
        _leaving.append(world)
        atexit.register(_leave, world)


def _leave(world: World) -> None:
    """Tell all others to end. If a session broke, or one of them does not answer, all are ended at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    if world.broken.is_set():
        world.abort()
    for rank in range(1, world.size):
        world.control.send(rank, (Leave(), None))
    left, deadline = 0, time.monotonic() + PATIENCE
    while left < world.size - 1:
        arrived = world.control.receive(seconds=max(0.0, deadline - time.monotonic()))
        if arrived is None:
            print("error: a rank does not end, so all are ended", file=sys.stderr, flush=True)
            world.abort()
        else:
            left += isinstance(arrived[1][0], Left)
    world.end()
