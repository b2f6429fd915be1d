"""A rank's end of the connection to the session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from msgspec.structs import replace

from splitc.runtime.arrays.array import Allocate, Array
from splitc.runtime.engines import Backend
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import Borrower, Lender
from splitc.runtime.processes.messages import Answer, Message, Order


class Control(Protocol):
    """Receives requests, sends answers."""

    def receive(self, spins: bool) -> Message:
        """Wait for the next message; with `spins`, a control may busy-wait.

        Raises EOFError or OSError if the session is gone.
        """

    def arrays(self, order: Order) -> tuple[dict[str, Array], dict[str, Array]]:
        """The feeds and initial states of the last order. They are valid until it is answered."""

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

    def receive(self, spins: bool) -> Message:
        self._channel.spin = self._spin if spins else 0.0
        message: Message = self._channel.receive()
        self.closed = message is None
        return message

    def arrays(self, order: Order) -> tuple[dict[str, Array], dict[str, Array]]:
        self._outputs.give_back(order.unused[self._number])
        arrays = self._feeds.look(order.arrays)
        return dict(arrays[: order.fed]), dict(arrays[order.fed :])

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
