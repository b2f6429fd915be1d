"""Takes what ranks' processes send: on a thread of its own, or on that of a caller who waits for an answer anyway.

The caller's thread has the answer sooner, since no other thread must wake it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from splitc.runtime.processes.wire import LOST, Wire
from splitc.runtime.threads.interrupts import later_interrupts

# Seconds between two looks at whether the ranks are alive.
LOOK = 0.5
# Of the seconds that an answer is expected to take, a caller sleeps the first share, then looks for messages without
# a pause until the second, if it may. It does not sleep for answers that take less than
# LEAST, and does not look longer for those that take more than MOST.
EARLY, LATE = 0.5, 2.0
LEAST, MOST = 5e-4, 1e-2


class Receiver(Protocol):
    """Who gets the messages, of one thread at a time."""

    def take(self, rank: int, message: Any) -> None:
        """Take a message of a rank."""

    def lost(self, rank: int) -> None:
        """A rank's process has ended."""

    def garbled(self, error: Exception) -> None:
        """What a rank sent can't be taken."""

    def look(self, alive: Sequence[int]) -> None:
        """See whether the ranks that have not ended are well. Called from time to time."""

    def is_waiting(self) -> bool:
        """Whether messages of the ranks are awaited."""


class Reader:
    """Reads what comes by a wire until all ranks are lost. With `spins`, a caller may look without a pause."""

    def __init__(self, wire: Wire, receiver: Receiver, spins: bool) -> None:
        self._wire = wire
        self._receiver = receiver
        self._spins = spins
        self._looked = 0.0
        self._turn = threading.Lock()
        # A queue, since a signal that comes in an Event's method may leave its lock locked.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="splitc ranks", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Messages are awaited, and no caller reads them."""
        if self._wake.empty():
            self._wake.put(None)

    def read_until(self, future: Future[Any], expected: float) -> None:
        """Read until the future is done, in some `expected` seconds, unless another thread reads: then return at once.

        An interrupt ends it after the message that is being read.
        """
        with later_interrupts() as interrupted:  # from the start: the turn of a caller that is gone would never end
            if not self._turn.acquire(blocking=False):
                self.wake()  # who reads may be about to stop
                return
            try:
                self._read_until(future, min(expected, MOST), interrupted)
            finally:
                self._turn.release()
                if self._receiver.is_waiting():
                    self.wake()

    def _read_until(self, future: Future[Any], expected: float, interrupted: Callable[[], bool]) -> None:
        late = time.perf_counter() + LATE * expected
        if self._spins and expected > LEAST:
            time.sleep(EARLY * expected)
        while self._wire.alive and not future.done() and not interrupted():
            while self._spins and time.perf_counter() < late and not self._wire.is_ready():
                pass
            self._receive(LOOK)

    def join(self, patience: float = 2 * LOOK) -> bool:
        """Wait until all ranks have ended, for at most so many seconds. Returns whether they have."""
        self.wake()
        if threading.current_thread() is not self._thread:  # it may close a session that nobody has any more
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Read what no caller does, and look after ranks that nobody waits for."""
        while self._wire.alive:
            with suppress(Empty):
                self._wake.get(timeout=LOOK)
            with self._turn:
                self._receive(0.0)
                while self._wire.alive and self._receiver.is_waiting():
                    self._receive(LOOK)

    def _receive(self, patience: float) -> None:
        """Take what has arrived, or arrives within `patience` seconds."""
        try:
            for rank, message in self._wire.take(patience):
                if message is LOST:
                    self._receiver.lost(rank)
                else:
                    self._receiver.take(rank, message)
        except Exception as error:  # all who wait for an answer would wait for ever
            self._receiver.garbled(error)
        now = time.monotonic()
        if now - self._looked > LOOK:
            self._looked = now
            self._receiver.look(self._wire.alive)
