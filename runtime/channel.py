"""Messages between two processes of a session."""

from __future__ import annotations

import pickle
import select
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from splitc.runtime.errors import SplitcError


class Channel:
    """One end of a socket for messages between two processes. Any thread may send, one receives.

    A receiver looks for a message for `spin` seconds before it sleeps.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self.spin = 0.0
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor behind it. Raises OSError if the other end is gone."""
        packed = message if isinstance(message, bytes) else pack(message)
        with self._lock:
            self._connection.send_bytes(packed)
            if descriptor is not None:
                send_handle(self._connection, descriptor, None)

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError or OSError if the other end is gone."""
        if self.spin:
            deadline = time.perf_counter() + self.spin
            while not self._poll.poll(0) and time.perf_counter() < deadline:
                pass
        return pickle.loads(self._connection.recv_bytes())

    def receive_descriptor(self) -> int:
        """The descriptor behind the last message."""
        return int(recv_handle(self._connection))

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def pack(message: Any) -> bytes:
    """The message as bytes."""
    return pickle.dumps(message, protocol=5)


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same if it can't be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is copied
        return SplitcError(f"{type(error).__name__}: {error}")
    return error
