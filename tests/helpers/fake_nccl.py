"""NCCL for simulated GPUs in processes: work on a fake stream that waits for the other ranks, by sockets."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from uuid import uuid4

import numpy as np

from tests.helpers.fake_cupy import STREAMS, Graph

TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]

available = True
# This process's communicators that are not released yet.
connected: set[NcclCommunicator] = set()


def get_unique_id() -> str:
    """The prefix of the ranks' socket names. They are no files, so a killed process leaves none."""
    return f"\0fake-nccl-{uuid4()}"


def view(pointer: int, count: int, kind: int) -> Any:
    size = count * np.dtype(TYPES[kind]).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer)).view(TYPES[kind])


class NcclCommunicator:
    """One rank's communicator. All ranks create theirs at the same time."""

    def __init__(self, ranks: int, unique: str, rank: int) -> None:
        self.comm, self._rank, self._ranks = 1, rank, ranks
        # Graphs that contain its work.
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._ends: dict[int, Connection] = {}
        listener = Listener(f"{unique}/{rank}", "AF_UNIX")
        accepting = threading.Thread(target=self._accept, args=(listener, ranks - 1 - rank))
        accepting.start()
        for other in range(rank):
            self._ends[other] = self._call(f"{unique}/{other}")
            self._ends[other].send(rank)
        accepting.join()
        connected.add(self)

    def _call(self, address: str) -> Connection:
        while True:
            with suppress(ConnectionRefusedError):  # it does not listen yet
                return Client(address, "AF_UNIX")

    def _accept(self, listener: Listener, count: int) -> None:
        for _ in range(count):
            end = listener.accept()
            self._ends[end.recv()] = end

    def allReduce(self, part: int, whole: int, count: int, kind: int, operation: int, stream: int) -> None:
        def work() -> None:
            own = view(part, count, kind).copy()
            parts = {self._rank: own}
            for rank in sorted(self._ends):
                parts[rank] = np.frombuffer(self._exchange(rank, own.tobytes()), TYPES[kind])
            every = np.stack([parts[rank] for rank in range(self._ranks)])
            view(whole, count, kind)[:] = every.sum(axis=0, dtype=every.dtype) if operation == 0 else every.max(axis=0)

        self._enqueue(work, stream)

    def _exchange(self, other: int, data: bytes) -> bytes:
        """Send to another rank, and receive from it. Only one of both sends first: a socket may not hold all data."""
        end = self._ends[other]
        if self._rank < other:
            end.send_bytes(data)
            return end.recv_bytes()
        received = end.recv_bytes()
        end.send_bytes(data)
        return received

    def send(self, pointer: int, count: int, kind: int, target: int, stream: int) -> None:
        self._enqueue(lambda: self._ends[target].send_bytes(view(pointer, count, kind).tobytes()), stream)

    def recv(self, pointer: int, count: int, kind: int, source: int, stream: int) -> None:
        def work() -> None:
            view(pointer, count, kind)[:] = np.frombuffer(self._ends[source].recv_bytes(), TYPES[kind])

        self._enqueue(work, stream)

    def abort(self) -> None:
        if self._graphs:
            raise RuntimeError("NCCL waits until there are no graphs any more with work of this communicator")
        connected.discard(self)
        for end in self._ends.values():
            end.close()

    def _enqueue(self, work: Callable[[], None], stream: int) -> None:
        if (graph := STREAMS[stream].graph) is not None:
            self._graphs.add(graph)
        STREAMS[stream].put(work)
