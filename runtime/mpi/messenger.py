"""Messages between MPI's processes: Python objects, whose arrays are sent without a copy, and what moves them.

MPI moves large messages only while the sender calls it, and a rank computes meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

# A process that waits for a message sleeps for this share of the time that it has waited, at most so many seconds,
# before it looks again: so a wait takes a tenth more at most. MPI's own waits spin, which takes a core.
SHARE, LONGEST = 0.1, 5e-3


def sleep_after(waited: float) -> None:
    """Sleep before the next look at what was waited for, for so many seconds by now."""
    time.sleep(min(SHARE * waited, LONGEST))


@dataclass
class Outgoing:
    """A message being sent. MPI reads from it until it `has_left`."""

    is_complete: Callable[[], bool]
    message: Any
    has_left: bool = False

    def look(self) -> bool:
        """Check whether it has left."""
        if not self.has_left and self.is_complete():
            self.has_left, self.message = True, None
        return self.has_left


class Sending(threading.Thread):
    """Calls MPI until all messages have left, and keeps what MPI reads from until then."""

    def __init__(self) -> None:
        super().__init__(name="splitc sending", daemon=True)
        self._added: SimpleQueue[Outgoing | None] = SimpleQueue()
        self._ended = threading.Event()
        self.start()

    def add(self, is_complete: Callable[[], bool], message: Any) -> Outgoing:
        """Keep a message until it has left. Nobody else may call `is_complete`: MPI forbids that for two threads."""
        sent = Outgoing(is_complete, message)
        if not sent.look():
            self._added.put(sent)
        return sent

    def run(self) -> None:
        while (sent := self._added.get()) is not None:
            begin = time.perf_counter()
            while not sent.look() and not self._ended.is_set():
                sleep_after(time.perf_counter() - begin)

    def end(self) -> None:
        """Stop, before this process ends."""
        self._ended.set()
        self._added.put(None)
        self.join()


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
