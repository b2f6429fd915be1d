"""Messages between the engines of a group whose ranks are on several machines, by MPI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.collectives.post import Post
from splitc.runtime.mpi.sending import Outgoing, sleep_after
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
        self._world.abort()

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
