"""Takes what ranks' processes send: on the thread of a caller who waits for an answer anyway, or on one of its own.

The caller's thread has the answer sooner, since no other thread must wake it. A session that is not at work has no
thread: a pipeline may have a hundred of them.
"""

from __future__ import annotations

import os
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
# Seconds after which a thread ends that has nothing to read.
IDLE = 1.0


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
    """Reads what comes by a wire until all ranks are lost. With `spins`, a caller may look without a pause.

    `ended` says that they are.
    """

    ended = False

    def __init__(self, wire: Wire, receiver: Receiver, spins: bool) -> None:
        self._wire = wire
        self._receiver = receiver
        self._spins = spins
        self._looked = 0.0
        self._turn = threading.Lock()
        self._has_turn: int | None = None  # the thread that reads
        # Queues, since a signal that comes in an Event's method may leave its lock locked.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._all_lost: SimpleQueue[None] = SimpleQueue()
        self._starting = threading.Lock()
        self._runs = False
        _WATCH.add(self)

    def wake(self) -> None:
        """Messages are awaited, and no caller reads them."""
        if self._wake.empty():
            self._wake.put(None)
        if not self._runs:
            with later_interrupts(), self._starting:
                self._runs = self._runs or self._start()

    def _start(self) -> bool:
        """Start the thread. Returns whether it could be: if not, who looks after all ranks reads, though later."""
        try:
            threading.Thread(target=self._run, name="splitc ranks", daemon=True).start()
        except RuntimeError:  # the system allows no more
            return False
        return True

    def read_until(self, future: Future[Any], expected: float) -> None:
        """Read until the future is done, in some `expected` seconds, unless another thread reads: then return at once.

        An interrupt ends it after the message that is being read.
        """
        with later_interrupts() as interrupted:  # from the start: the turn of a caller that is gone would never end
            if not self._take_turn(blocking=False):
                self.wake()  # who reads may be about to stop
                return
            try:
                self._read_until(future, min(expected, MOST), interrupted)
            finally:
                self._end_turn()
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
        if self._has_turn != threading.get_ident():  # it may close a session that nobody has any more
            with suppress(Empty):
                self._all_lost.put(self._all_lost.get(timeout=patience))
        return self.ended

    def glance(self) -> None:
        """Look after the ranks, unless somebody reads."""
        if self._take_turn(blocking=False):
            try:
                self._receive(0.0)
            finally:
                self._end_turn()

    def _take_turn(self, blocking: bool) -> bool:
        taken = self._turn.acquire(blocking)
        if taken:
            self._has_turn = threading.get_ident()
        return taken

    def _end_turn(self) -> None:
        self._has_turn = None
        self._turn.release()

    def _run(self) -> None:
        """Read what no caller does."""
        while not self.ended:
            try:
                self._wake.get(timeout=IDLE)
            except Empty:
                with self._starting:
                    self._runs = False  # from now on, who wakes starts another one
                    if self._wake.empty():
                        return
                    self._runs = True
            self._take_turn(blocking=True)
            try:
                self._receive(0.0)
                while self._wire.alive and self._receiver.is_waiting():
                    self._receive(LOOK)
            finally:
                self._end_turn()

    def _receive(self, patience: float) -> None:
        """Take what has arrived, or arrives within `patience` seconds, and look after the ranks from time to time."""
        try:
            for rank, message in self._wire.take(patience):
                if message is LOST:
                    self._receiver.lost(rank)
                else:
                    self._receiver.take(rank, message)
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._looked = now
                self._receiver.look(self._wire.alive)
        except Exception as error:  # all who wait for an answer would wait for ever
            self._receiver.garbled(error)
        if not self._wire.alive and not self.ended:
            self.ended = True
            self._all_lost.put(None)
            self._wake.put(None)


class _Watch:
    """The thread that looks after the ranks of all sessions that nobody waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._thread: threading.Thread | None = None

    def add(self, reader: Reader) -> None:
        """Look after the ranks of a reader until they have ended."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="splitc watches", daemon=True)
                thread.start()  # or there are too many: the next one to come tries again
                self._thread = thread
            self._readers.append(reader)

    def _run(self) -> None:
        while True:
            time.sleep(LOOK)
            with self._lock:
                self._readers = [each for each in self._readers if not each.ended]
                if not self._readers:
                    self._thread = None
                    return
                readers = list(self._readers)
            for each in readers:
                each.glance()


_WATCH = _Watch()


def _begin_anew() -> None:
    """In a copy of this process: it has no thread of it, and must not read what is another one's."""
    global _WATCH
    _WATCH = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
