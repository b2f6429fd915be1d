"""Messages between two processes of a session: pickles with long arrays beside them, which neither end copies."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from splitc.runtime.errors import SplitcError

# Pieces of a message, in order.
Pieces = Sequence[bytes | memoryview]
# Bytes of a number, and of the longest array that is part of a pickle.
NUMBER, LONGEST = 8, 1 << 16
# Arrays begin at multiples of so many bytes in a message, as vector instructions like it.
ALIGNMENT = 64


def pickled(message: Any) -> Pieces:
    """A message as pieces: the number of its long arrays, the sizes of the rest if there are any, a pickle, the arrays.

    The arrays are not copied.
    """
    arrays: list[memoryview] = []

    def is_short(array: pickle.PickleBuffer) -> bool:
        raw = array.raw()
        if len(raw) > LONGEST:
            arrays.append(raw)
        return len(raw) <= LONGEST

    packed = pickle.dumps(message, protocol=5, buffer_callback=is_short)
    if not arrays:
        return [bytes(NUMBER), packed]
    pieces: list[bytes | memoryview] = [packed, *arrays]
    sizes = struct.pack(f"<{1 + len(pieces)}Q", len(arrays), *map(len, pieces))
    return [part for piece in [sizes, *pieces] for part in (piece, bytes(-len(piece) % ALIGNMENT))]


def unpickled(packed: bytearray) -> Any:
    """The message in these bytes. Its long arrays are views of them."""
    whole = memoryview(packed)
    (count,) = struct.unpack_from("<Q", packed)
    if not count:
        return pickle.loads(whole[NUMBER:])
    sizes = NUMBER * (2 + count), *struct.unpack_from(f"<{1 + count}Q", packed, NUMBER)
    starts = accumulate((size + -size % ALIGNMENT for size in sizes), initial=0)
    _, message, *arrays = (whole[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(message, buffers=arrays)


# Bytes of a message's length, which comes before it, and of the buffer for messages that fit into it.
LENGTH, USUAL = 8, 1 << 16
# The most descriptors that the system lets come with one message, and the space that they take.
MOST = 253
SPACE = socket.CMSG_SPACE(MOST * array.array("i").itemsize)
# In place of descriptors that this process could not have.
LACKING = -1
# The most pieces that are sent at once. A choice: the system lets it be 1,024.
TOGETHER = 64


class Channel:
    """One end of a socket for messages between two processes. Any thread may send, one at a time receives.

    - `spin`: the seconds that a receiver polls before it sleeps.
    - `encode`: turns a message into pieces.
    - `decode`: turns the bytes of a message, which it owns, into a message.
    """

    def __init__(
        self, descriptor: int, encode: Callable[[Any], Pieces] = pickled, decode: Callable[[bytearray], Any] = unpickled
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._encode, self._decode = encode, decode
        self.spin = 0.0
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        # So many bytes have arrived: in the buffer, or of a message that is longer, if there is one.
        self._filled = 0
        self._buffer, self._long = bytearray(USUAL), bytearray()
        self._messages: deque[Any] = deque()
        self._descriptors: deque[int] = deque()
        # What did not fit into the socket yet: bytes, and copies of the descriptors that go with the first of them.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: Any, *descriptors: int) -> None:
        """Send a message, and descriptors with it. Raises OSError if the other end is gone."""
        pieces = _with_length(self._encode(message))
        with self._lock:
            sent = self._socket.sendmsg(pieces[:TOGETHER], _rights(descriptors))
            for piece in pieces:
                if sent < len(piece):
                    self._socket.sendall(memoryview(piece)[sent:])
                sent = max(0, sent - len(piece))

    def send_nowait(self, message: Any, *descriptors: int) -> None:
        """As `send`, but does not wait while the socket is full: the rest is sent with the next message, or by `flush`.

        So two processes that send to each other never wait for each other.
        """
        packed = b"".join(_with_length(self._encode(message)))
        with self._lock:
            self._unsent.append((packed, [os.dup(descriptor) for descriptor in descriptors]))
            self._send_unsent()

    def flush(self) -> bool:
        """Send the rest of `send_nowait`, as far as it fits. Returns whether all has left.

        Raises OSError if the other end is gone.
        """
        if self._unsent:
            with self._lock:
                self._send_unsent()
        return not self._unsent

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = self._socket.sendmsg([data], _rights(descriptors), socket.MSG_DONTWAIT)
                for descriptor in descriptors:
                    os.close(descriptor)
                self._unsent[0] = data[sent:], []
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            pass

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError or OSError if the other end is gone."""
        deadline = time.perf_counter() + self.spin
        while not self._messages:
            while self.spin and not self._poll.poll(0) and time.perf_counter() < deadline:
                pass
            self._messages.extend(self.take())
        return self._messages.popleft()

    def take(self) -> list[Any]:
        """Wait until something arrives, and return the complete messages. Raises as `receive` does."""
        with memoryview(self._long or self._buffer) as buffer, buffer[self._filled :] as rest:
            count, rights, flags, _ = self._socket.recvmsg_into([rest], SPACE)
        if not count:
            raise EOFError
        self._descriptors.extend(descriptor for right in rights for descriptor in array.array("i", right[2]))
        if flags & socket.MSG_CTRUNC:  # descriptors came that this process can't have; the message is there
            self._descriptors.append(LACKING)
        self._filled += count
        if not self._long:
            return list(self._complete())
        if self._filled < len(self._long):
            return []
        whole, self._long, self._filled = self._long, bytearray(), 0
        return [self._decode(whole)]

    def _complete(self) -> Iterator[Any]:
        """Take the complete messages out of the buffer. If the next one is long, the rest of it arrives elsewhere."""
        start, end = 0, LENGTH
        while end <= self._filled:
            body, end = end, end + int.from_bytes(self._buffer[start:end], "little")
            if end > self._filled:
                if end - start > USUAL:
                    self._long = self._buffer[body : self._filled].ljust(end - body, b"\0")
                    self._filled = self._filled - body
                    return
                break
            yield self._decode(self._buffer[body:end])
            start, end = end, end + LENGTH
        rest = self._buffer[start : self._filled]
        self._buffer[: len(rest)], self._filled = rest, len(rest)

    def receive_descriptor(self) -> int:
        """The descriptor that came with a message: the oldest that was not taken.

        Raises OSError if this process had too many open files when it came.
        """
        descriptor = self._descriptors.popleft()
        if descriptor == LACKING:
            raise OSError(errno.EMFILE, "too many open files (ulimit -n)")
        return descriptor

    def finish(self) -> None:
        """Send no more. The other end receives all earlier messages, and then EOFError."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end, and the descriptors that nobody has taken."""
        self._socket.close()
        for _, descriptors in self._unsent:
            self._descriptors.extend(descriptors)
        while self._descriptors:
            if (descriptor := self._descriptors.popleft()) != LACKING:
                os.close(descriptor)


def _with_length(pieces: Pieces) -> Pieces:
    return [sum(map(len, pieces)).to_bytes(LENGTH, "little"), *pieces]


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that passes descriptors. socket.send_fds does the same, but ignores flags."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []


def portable(error: BaseException) -> BaseException:
    """The error, or an equivalent one if it can't be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is copied
        return SplitcError(f"{type(error).__name__}: {error}")
    return error
