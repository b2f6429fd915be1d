"""Messages on their way. MPI moves large ones only while the sender calls it, and a rank computes for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

# Of the time that a process has waited for a message, it sleeps this share before it looks again, and at most so many
# seconds. MPI's own waits look without a pause, which takes a core.
SHARE, LONGEST = 0.1, 5e-3


def sleep_after(waited: float) -> None:
    """Sleep before looking again for what one has waited for, for so many seconds."""
    time.sleep(min(SHARE * waited, LONGEST))


class Sending(threading.Thread):
    """Calls MPI until all messages have left, and keeps what MPI reads from until then."""

    def __init__(self) -> None:
        super().__init__(name="splitc sending", daemon=True)
        self._added: SimpleQueue[tuple[Callable[[], bool], Any] | None] = SimpleQueue()
        self._ended = threading.Event()
        self.start()

    def add(self, has_left: Callable[[], bool], message: Any) -> None:
        """Care for a message."""
        if not has_left():
            self._added.put((has_left, message))

    def run(self) -> None:
        while (added := self._added.get()) is not None:
            has_left, begin = added[0], time.perf_counter()
            while not has_left() and not self._ended.is_set():
                sleep_after(time.perf_counter() - begin)

    def end(self) -> None:
        """Care no more, before this process ends."""
        self._ended.set()
        self._added.put(None)
        self.join()
