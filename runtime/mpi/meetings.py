"""Meetings of engines in MPI's processes: in shared memory, or by MPI's messages between machines."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.collectives.meeting import LINE, Meeting, shared_bytes
from splitc.runtime.collectives.post import Post
from splitc.runtime.hardware.devices import bound_cores, within_limit
from splitc.runtime.ipc.shared_memory import create_memory, map_memory
from splitc.runtime.mpi.life import abort_all
from splitc.runtime.mpi.messenger import Outgoing, sleep_after
from splitc.runtime.mpi.world import World


class MpiPost(Post):
    """One rank's end. `communicator` is the group's, and is freed with it."""

    def __init__(self, world: World, communicator: Any) -> None:
        super().__init__(communicator.size, communicator.rank)
        self._world = world
        self._communicator = communicator
        self._on_their_way: list[Outgoing] = []

    def send(self, peer: int, message: Array) -> None:
        request = self._communicator.Isend(message, peer)
        sent = self._world.sending.add(request.Test, message)
        self._on_their_way = [outgoing for outgoing in (*self._on_their_way, sent) if not outgoing.has_left]

    def receive(self, seconds: float) -> tuple[int, Array] | None:
        from mpi4py import MPI

        status, begin = MPI.Status(), time.perf_counter()
        while (arrived := self._communicator.Improbe(status=status)) is None:
            if (waited := time.perf_counter() - begin) >= seconds:
                return None
            sleep_after(waited)
        message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        taken, begin = arrived.Irecv(message), time.perf_counter()
        while not taken.Test():  # MPI's own wait would take a core from the sender, if it is on this host
            sleep_after(time.perf_counter() - begin)
        return status.Get_source(), message

    def broken(self) -> None:
        abort_all()

    def close(self) -> None:
        """Free the communicator. All ranks of the group must call this. What was sent in vain is dropped."""
        begin, all_sent = time.perf_counter(), None
        while all_sent is None or not all_sent.Test():
            while self.receive(0.0) is not None:
                pass
            if all_sent is None and all(outgoing.has_left for outgoing in self._on_their_way):
                all_sent = self._communicator.Ibarrier()
            sleep_after(time.perf_counter() - begin)
        self._communicator.Free()


class Meetings:
    """This process's `ends` of the meetings of all groups that it is in. All processes of a group must make theirs."""

    def __init__(self, world: World, groups: Iterable[tuple[int, ...]]) -> None:
        self._world = world
        self._posts: list[MpiPost] = []
        self.ends = {group: self._make(group) for group in sorted(groups) if world.rank in group}

    def _make(self, group: tuple[int, ...]) -> Meeting:
        everyone = self._world.communicator.Get_group()
        communicator = self._world.communicator.Create_group(everyone.Incl([self._world.first + n for n in group]))
        one_machine = len({self._world.machines[rank] for rank in group}) == 1
        memory = _share_memory(communicator, shared_bytes(len(group))) if one_machine else None
        if memory is not None:
            together = set().union(*communicator.allgather(bound_cores()))  # MPI may have bound each rank to its own
            communicator.Free()
            return Meeting(len(group), memory, together=within_limit(len(together)))
        self._posts.append(MpiPost(self._world, communicator))
        return Meeting(len(group), post=self._posts[-1])

    def close(self) -> None:
        """End all meetings. All processes must call this."""
        self.ends = {}
        while self._posts:
            self._posts.pop().close()


def _share_memory(communicator: Any, size: int) -> Array | None:
    """Zeroed memory that all processes share; None if one of them can't open it, as in different containers.

    It is a file without a name, which the others open in the first process's /proc: however they end, nothing is left.
    """
    key, descriptor = uuid.uuid4().bytes, -1
    if communicator.rank == 0:
        descriptor = create_memory(size + LINE)
        os.pwrite(descriptor, key, size)
    process, number, key = communicator.bcast((os.getpid(), descriptor, key))
    if communicator.rank:
        descriptor = _open(f"/proc/{process}/fd/{number}", key, size)
    if min(communicator.allgather(descriptor)) < 0:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return map_memory(descriptor)


def _open(path: str, key: bytes, size: int) -> int:
    """A descriptor of the file if it ends with this key; -1 if not: another process may have this number here."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return -1
    if os.pread(descriptor, len(key), size) == key:
        return descriptor
    os.close(descriptor)
    return -1
