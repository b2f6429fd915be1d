"""Messages between the processes that MPI has started: Python objects, whose arrays are not copied on the way."""

from __future__ import annotations

import math
import time
from typing import Any

from splitc.runtime.mpi.sending import Sending, sleep_after


class Post:
    """A communicator's messages, which arrive in the order of sending. Any thread may send, one at a time receives."""

    def __init__(self, communicator: Any, sending: Sending) -> None:
        from mpi4py import MPI
        from mpi4py.util import pkl5

        self._any = MPI.ANY_SOURCE
        self._communicator = pkl5.Intracomm(communicator)
        self._sending = sending

    def send(self, target: int, message: Any) -> None:
        """Send a message. Its arrays may not be written to until the other process has it."""
        request = self._communicator.isend(message, target)
        self._sending.add(lambda: bool(request.test()[0]), message)

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
