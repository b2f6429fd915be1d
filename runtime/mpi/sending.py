"""Progress of messages: MPI moves large ones only while the sender calls it, and a rank computes meanwhile."""

from __future__ import annotations

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
