"""Messages on their way. MPI moves large ones only while the sender calls it, and a rank computes for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

# Of the time that a process has waited for a message, it sleeps this share before it looks again, and at most so many
# seconds. MPI's own waits look without a pause, which takes a core.
SHARE, LONGEST = 0.1, 5e-3


def sleep_after(waited: float) -> None:
    """Sleep before looking again for what one has waited for, for so many seconds."""
    time.sleep(min(SHARE * waited, LONGEST))


@dataclass
class Sent:
    """A message on its way, which MPI reads from until it `has_left`."""

    is_complete: Callable[[], bool]
    message: Any
    has_left: bool = False

    def look(self) -> bool:
        """See whether it has left."""
        if not self.has_left and self.is_complete():
            self.has_left, self.message = True, None
        return self.has_left


class Sending(threading.Thread):
    """Calls MPI until all messages have left, and keeps what MPI reads from until then."""

    def __init__(self) -> None:
        super().__init__(name="splitc sending", daemon=True)
        self._added: SimpleQueue[Sent | None] = SimpleQueue()
        self._ended = threading.Event()
        self.start()

    def add(self, is_complete: Callable[[], bool], message: Any) -> Sent:
        """Care for a message. Nobody else may call `is_complete`: two threads may not test one request of MPI's."""
        sent = Sent(is_complete, message)
        if not sent.look():
            self._added.put(sent)
        return sent

    def run(self) -> None:
        while (sent := self._added.get()) is not None:
            begin = time.perf_counter()
            while not sent.look() and not self._ended.is_set():
                sleep_after(time.perf_counter() - begin)

    def end(self) -> None:
        """Care no more, before this process ends."""
        self._ended.set()
        self._added.put(None)
        self.join()
