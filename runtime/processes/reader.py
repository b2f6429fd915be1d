"""Reads the answers of rank processes, on the thread of a waiting caller or on one of its own.

The caller's thread has the answer sooner, since no other thread must wake it. An idle session has no thread: a pipeline
may have a hundred sessions.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from splitc.runtime.log import LOG
from splitc.runtime.processes.wire import Wire
from splitc.runtime.threads.interrupts import later_interrupts

# Seconds between two looks at whether the ranks are alive. A choice: a dead rank's connection ends at once, and only of
# a rank that hangs is nothing heard; PATIENCE is 16 looks.
LOOK = 0.5
# Of the seconds that an answer is expected to take, a caller sleeps the first share, then busy-waits until the second,
# if it may. It does not sleep for answers that take less than LEAST, since a sleep takes 0.06 ms too long on a usual
# machine, and more on others; nor does it busy-wait longer for those that take more than MOST. The shares are a choice:
# an answer that comes earlier or later is noticed as late as a sleep is. Only callers of GPUs busy-wait.
EARLY, LATE = 0.5, 2.0
LEAST, MOST = 5e-4, 1e-2
# Seconds after which a thread ends that has nothing to read. A choice: sooner, and callers who pause would start one
# for each request.
IDLE = 1.0


class Reader:
    """Lets one thread at a time read a wire, until all ranks are lost: then it has `ended`.

    - `receive`: handles messages that have arrived, or arrive within this many seconds.
    - `is_waiting`: whether any message is awaited.
    - `spins`: whether a caller may busy-wait.
    """

    ended = False

    def __init__(
        self, wire: Wire, receive: Callable[[float], None], is_waiting: Callable[[], bool], spins: bool
    ) -> None:
        self._wire = wire
        self._take = receive
        self._is_waiting = is_waiting
        self._spins = spins
        self._reading = threading.Lock()
        self._who_reads: int | None = None  # the thread
        # Queues, since a signal that comes in an Event's method may leave its lock locked.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._all_lost: SimpleQueue[None] = SimpleQueue()
        self._starting = threading.Lock()
        self._runs = False
        _WATCH.add(self)

    def wake(self) -> None:
        """Have messages read that no caller reads."""
        if self._wake.empty():
            self._wake.put(None)
        if not self._runs:
            with later_interrupts(), self._starting:
                self._runs = self._runs or self._start()

    def _start(self) -> bool:
        """Start the thread. Returns whether that worked; if not, the watch over all ranks reads, though later."""
        try:
            threading.Thread(target=self._run, name="splitc ranks", daemon=True).start()
        except RuntimeError:  # the system allows no more
            return False
        return True

    def read_until(self, future: Future[Any], expected: float) -> None:
        """Read until the future is done, in about `expected` seconds. Returns at once if another thread reads.

        An interrupt ends it after the current message.
        """
        with later_interrupts() as interrupted:  # from the start: nobody could read after a caller that is gone
            if not self._begin(blocking=False):
                self.wake()  # who reads may be about to stop
                return
            try:
                self._read_until(future, min(expected, MOST), interrupted)
            finally:
                self._end()
                if self._is_waiting():
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
        """Wait until all ranks have ended, for at most `patience` seconds. Returns whether they have."""
        self.wake()
        if self._who_reads != threading.get_ident():  # it may close a session that nobody has any more
            with suppress(Empty):
                self._all_lost.put(self._all_lost.get(timeout=patience))
        return self.ended

    def glance(self) -> None:
        """Check on the ranks, unless another thread reads."""
        if self._begin(blocking=False):
            try:
                self._receive(0.0)
            finally:
                self._end()

    def _begin(self, blocking: bool) -> bool:
        """Begin to read, unless another thread does. Returns whether this thread may."""
        begun = self._reading.acquire(blocking)
        if begun:
            self._who_reads = threading.get_ident()
        return begun

    def _end(self) -> None:
        self._who_reads = None
        self._reading.release()

    def _run(self) -> None:
        """Read the messages that no caller reads."""
        while not self.ended:
            try:
                self._wake.get(timeout=IDLE)
            except Empty:
                with self._starting:
                    self._runs = False  # from now on, who wakes starts another one
                    if self._wake.empty():
                        return
                    self._runs = True
            self._begin(blocking=True)
            try:
                self._receive(0.0)
                while self._wire.alive and self._is_waiting():
                    self._receive(LOOK)
            finally:
                self._end()

    def _receive(self, patience: float) -> None:
        """Handle messages that have arrived, or arrive within `patience` seconds, and check whether all ranks ended."""
        self._take(patience)
        if not self._wire.alive and not self.ended:
            self.ended = True
            self._all_lost.put(None)
            self._wake.put(None)


class _Watch:
    """The thread that checks on the ranks of all idle sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._thread: threading.Thread | None = None

    def add(self, reader: Reader) -> None:
        """Check on the ranks of a reader until they have ended."""
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
                self._readers = [reader for reader in self._readers if not reader.ended]
                if not self._readers:
                    self._thread = None
                    return
                readers = list(self._readers)
            for reader in readers:
                try:
                    reader.glance()
                except Exception:  # the other sessions are looked after all the same
                    LOG.exception("a look at a session's ranks failed")


_WATCH = _Watch()


def _begin_anew() -> None:
    """Reset in a forked process: it does not have the watch's thread, and must not read another process's messages."""
    global _WATCH
    _WATCH = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
