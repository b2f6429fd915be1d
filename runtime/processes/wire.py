"""The session's end of the connections to all ranks."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import HandOverError
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import Borrower, Lender, SharedArrays
from splitc.runtime.processes.messages import Message, Order, pack

# Named arrays, in order.
Arrays = Sequence[tuple[str, Array]]
# In place of a message: the rank's process has ended.
LOST = object()


class Wire(Protocol):
    """Messages to all ranks, and from each."""

    def order(self, order: Order, feeds: Arrays, initial: Arrays) -> None:
        """Give all ranks a request, with these feeds and initial states."""

    def send(self, message: Message) -> None:
        """Send a message to all ranks. Ranks that are gone are skipped: the reader notices them."""

    def outputs(self, rank: int, shared: SharedArrays | None) -> dict[str, Array]:
        """The arrays of the last answer that was taken from a rank."""

    def is_ready(self) -> bool:
        """Whether something has arrived."""

    def take(self, seconds: float) -> list[tuple[int, Any]]:
        """The messages that have arrived, or arrive within these seconds: pairs of a rank and its message, or LOST."""

    @property
    def alive(self) -> Sequence[int]:
        """The ranks that were not lost."""


class SocketWire:
    """A wire of channels. Arrays are in shared memory. At most `in_flight` requests are in flight."""

    def __init__(self, channels: Sequence[Channel], in_flight: int) -> None:
        self._channels = channels
        self._feeds = Lender()
        # The buffers of the last requests, the oldest first.
        self._fed: deque[int | None] = deque([None] * in_flight)
        self._outputs = [Borrower(channel.receive_descriptor) for channel in channels]
        self._poll = select.poll()
        self._ranks = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)

    def order(self, order: Order, feeds: Arrays, initial: Arrays) -> None:
        if self._fed[0] is not None:  # its request has ended, since this one is in flight
            self._feeds.give_back([self._fed[0]])
            self._fed[0] = None
        sent, descriptors = self._feeds.send([*feeds, *initial])
        self._fed.popleft()
        self._fed.append(None if sent is None else sent.buffer)
        # Only now: what is not sent never goes back.
        unused = tuple(tuple(borrower.unused()) for borrower in self._outputs)
        try:
            packed = pack(replace(order, arrays=sent, fed=len(feeds), unused=unused))
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send_nowait(packed, *descriptors)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the rank is gone, which the reader notices
                except BaseException as error:
                    raise HandOverError(f"rank {rank} could not be given a request: {error!r}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send(self, message: Message) -> None:
        packed = pack(message)
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send_nowait(packed)

    def outputs(self, rank: int, shared: SharedArrays | None) -> dict[str, Array]:
        return self._outputs[rank].receive(shared)

    def is_ready(self) -> bool:
        return bool(self._poll.poll(0))

    def take(self, seconds: float) -> list[tuple[int, Any]]:
        taken: list[tuple[int, Any]] = []
        for descriptor, rank in self._ranks.items():
            with contextlib.suppress(OSError):  # it is gone, which is seen below
                all_sent = self._channels[rank].flush()
                self._poll.modify(descriptor, select.POLLIN | (0 if all_sent else select.POLLOUT))
        for descriptor, events in self._poll.poll(1e3 * seconds):
            if events == select.POLLOUT:  # there is room, for the next call
                continue
            rank = self._ranks[descriptor]
            try:
                taken += [(rank, message) for message in self._channels[rank].take()]
            except (EOFError, OSError):
                self._poll.unregister(descriptor)
                del self._ranks[descriptor]
                taken.append((rank, LOST))
        return taken

    @property
    def alive(self) -> Sequence[int]:
        return list(self._ranks.values())

    def close(self) -> None:
        """Close the channels, and free the memory of arrays that are no longer in use."""
        for channel in self._channels:
            channel.close()
        self._feeds.close()
        self._outputs = []
