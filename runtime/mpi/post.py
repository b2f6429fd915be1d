"""Messages between the processes that MPI has started: Python objects, whose arrays are not copied on the way."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

# Of the time that a process has waited for a message, it sleeps this share before it looks again, and at most so many
# seconds. MPI's own waits look without a pause, which takes a core.
SHARE, LONGEST = 0.1, 5e-3


def sleep_after(waited: float) -> None:
    """Sleep before looking again for what one has waited for, for so many seconds."""
    time.sleep(min(SHARE * waited, LONGEST))


class Post:
    """A communicator's messages, which arrive in the order of sending. Any thread may send, one at a time receives."""

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI
        from mpi4py.util import pkl5

        self._any = MPI.ANY_SOURCE
        self._communicator = pkl5.Intracomm(communicator)
        self._lock = threading.Lock()
        # Messages that are on their way, and their objects, which MPI reads from.
        self._sending: list[tuple[Any, Any]] = []

    def send(self, target: int, message: Any) -> None:
        """Send a message. Its arrays may not be written to until the other process has it."""
        sending = self._communicator.isend(message, target)
        with self._lock:
            self._sending = [each for each in self._sending if not each[0].test()[0]]
            self._sending.append((sending, message))

    def is_ready(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._communicator.iprobe(self._any))

    def receive(
        self, source: int | None = None, seconds: float = math.inf, spin: float = 0.0
    ) -> tuple[int, Any] | None:
        """The next message of a process, or of any, and who sent it. None if none arrives within these seconds.

        It is looked for without a pause for `spin` seconds.
        """
        from mpi4py import MPI

        status, begin = MPI.Status(), time.perf_counter()
        while (arrived := self._communicator.improbe(self._any if source is None else source, status=status)) is None:
            waited = time.perf_counter() - begin
            if waited >= seconds:
                return None
            if waited >= spin:
                sleep_after(waited)
        return status.Get_source(), arrived.recv()
