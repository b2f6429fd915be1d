"""Messages between MPI's processes: Python objects, whose arrays are sent without a copy."""

from __future__ import annotations

import math
import time
from typing import Any

from splitc.runtime.mpi.sending import Sending, sleep_after

# The lanes of a communicator, whose messages are told apart by two tags: of messages, and of the parts of large ones.
# MPI has no fewer than 32768 tags.
LANES = 1 << 14


class Messenger:
    """A communicator's messages, which arrive in the order of sending. Any thread may send, one at a time receives.

    A small message is one MPI message. An empty one announces a message with large arrays (from MPI4PY_PICKLE_THRESHOLD
    bytes on), each of which is sent on its own, without a copy. Lanes are separate: a message arrives in the lane that
    it was sent in.
    """

    def __init__(self, communicator: Any, sending: Sending, lane: int = 0) -> None:
        from mpi4py import MPI
        from mpi4py.util import pkl5

        self._any, self._byte, self._status = MPI.ANY_SOURCE, MPI.BYTE, MPI.Status()
        self._communicator = communicator
        self._large = pkl5.Intracomm(communicator)
        self._pickle = MPI.Pickle()
        self._sending = sending
        self._message, self._parts = 2 * (lane % LANES), 2 * (lane % LANES) + 1

    def in_lane(self, lane: int) -> Messenger:
        """The messenger of another lane."""
        return Messenger(self._communicator, self._sending, lane)

    def send(self, target: int, message: Any) -> None:
        """Send a message. Its arrays must not be written to until the other process has it."""
        data, large = self._pickle.dumps_oob(message)
        sent = self._communicator.Isend([b"" if large else data, self._byte], target, self._message)
        if not large:
            self._sending.add(sent.Test, data)
            return
        parts = self._large.isend(message, target, self._parts)
        self._sending.add(lambda: sent.Test() and bool(parts.test()[0]), message)

    def is_ready(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._communicator.iprobe(self._any, self._message))

    def receive(
        self, source: int | None = None, seconds: float = math.inf, spin: float = 0.0
    ) -> tuple[int, Any] | None:
        """The next message of a process, or of any, with its sender. None if none arrives within these seconds.

        Polls without a pause for the first `spin` seconds.
        """
        wanted, begin = self._any if source is None else source, time.perf_counter()
        while (arrived := self._communicator.improbe(wanted, self._message, self._status)) is None:
            waited = time.perf_counter() - begin
            if waited >= seconds:
                return None
            if waited >= spin:
                sleep_after(waited)
        sender = self._status.Get_source()
        if self._status.Get_count(self._byte):
            return sender, arrived.recv()
        arrived.Recv([bytearray(), self._byte])
        return sender, self._large.recv(source=sender, tag=self._parts)
