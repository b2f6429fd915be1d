"""Both ends of the messages between the session and its ranks' processes: by channels, with arrays in shared memory."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from splitc.runtime.arrays.array import Allocate, Array
from splitc.runtime.engines import Backend
from splitc.runtime.errors import HandOverError
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import Borrower, Lender, SharedArrays
from splitc.runtime.processes.messages import Answer, Message, Order, pack

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


class Control(Protocol):
    """Receives requests, sends answers."""

    def receive(self, spins: bool) -> Message:
        """Wait for the next message; with `spins`, a control may busy-wait.

        Raises EOFError or OSError if the session is gone.
        """

    def arrays(self, order: Order) -> tuple[dict[str, Array], dict[str, Array]]:
        """The feeds and initial states of the last order. They are valid until it is answered."""

    def lent(self) -> int:
        """The bytes of the last order's feeds that are in shared memory."""

    def send(self, message: Message) -> None:
        """Send the session a message."""

    def answer(self, answer: Answer, outputs: Mapping[str, Array]) -> None:
        """Answer a request with these outputs."""

    def allocator(self, backend: Backend) -> Allocate | None:
        """The allocator for a GPU's outputs; None if any memory will do."""


class SocketControl:
    """A control by a channel. Arrays are in shared memory. A rank busy-waits for `spin` seconds, if it may.

    `closed` says whether the session was closed, after all requests.
    """

    closed = False

    def __init__(self, channel: Channel, number: int, spin: float) -> None:
        self._channel = channel
        self._number = number
        self._spin = spin
        self._feeds = Borrower(channel.receive_descriptor)
        self._outputs = Lender()
        self._lent = 0

    def receive(self, spins: bool) -> Message:
        self._channel.spin = self._spin if spins else 0.0
        message: Message = self._channel.receive()
        self.closed = message is None
        return message

    def arrays(self, order: Order) -> tuple[dict[str, Array], dict[str, Array]]:
        self._outputs.give_back(order.unused[self._number])
        arrays = self._feeds.look(order.arrays)
        self._lent = sum(array.nbytes for _, array in arrays[: order.fed])
        return dict(arrays[: order.fed]), dict(arrays[order.fed :])

    def lent(self) -> int:
        return self._lent

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def answer(self, answer: Answer, outputs: Mapping[str, Array]) -> None:
        sent, new = self._outputs.send(list(outputs.items()))
        self._channel.send(replace(answer, outputs=sent), *new)
        for descriptor in new:
            os.close(descriptor)

    def allocator(self, backend: Backend) -> Allocate | None:
        if not isinstance(backend, GpuDevice):
            return None
        self._outputs = Lender(backend.pin)
        return self._outputs.allocate

    def release(self) -> None:
        """Free the memory of feeds and outputs, after all requests, in a process that goes on."""
        self._outputs.close()
        self._feeds.close()
