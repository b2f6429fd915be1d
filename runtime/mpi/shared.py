"""Memory that the processes of a group share, where their engines meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from splitc.runtime.collectives.engine_meeting import EngineMeeting, shared_bytes
from splitc.runtime.mpi.world import World


class SharedMeetings:
    """The meetings of all groups that this process is in. All processes of the groups must make theirs alike."""

    def __init__(self, world: World, groups: Sequence[tuple[int, ...]]) -> None:
        self._windows: list[Any] = []
        self.meetings = {group: self._make(world, group) for group in sorted(groups) if world.rank in group}

    def _make(self, world: World, group: tuple[int, ...]) -> EngineMeeting:
        from mpi4py import MPI

        everyone = world.communicator.Get_group()
        communicator = world.communicator.Create_group(everyone.Incl(group))
        window = MPI.Win.Allocate_shared(
            shared_bytes(len(group)) if communicator.rank == 0 else 0, 1, comm=communicator
        )
        self._windows.append(window)
        place: Any = window.Shared_query(0)[0]
        memory = np.frombuffer(place, np.uint8)
        if communicator.rank == 0:
            memory[:] = 0
        communicator.Barrier()
        return EngineMeeting(len(group), memory)

    def free(self) -> None:
        """Free the memory, which nobody may use any more. All processes must call this."""
        self.meetings = {}
        while self._windows:
            self._windows.pop().Free()
