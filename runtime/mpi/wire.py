"""Both ends of the messages between the session and its ranks: by MPI, and by queues to rank 0, in its own process."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from splitc.runtime.arrays.array import Allocate, Array
from splitc.runtime.collectives import Label
from splitc.runtime.engines import Backend
from splitc.runtime.errors import HandOverError
from splitc.runtime.ipc.mapped_files import NCCL, find_mapped, remove_files
from splitc.runtime.ipc.shared_memory import SharedArrays
from splitc.runtime.mpi.messages import AllLoaded, Left, Stop
from splitc.runtime.mpi.messenger import Messenger, sleep_after
from splitc.runtime.processes.messages import Answer, Message, Order
from splitc.runtime.processes.wire import LOST, Arrays

# The recent answers of a machine that count: clocks drift, so old answers say little. A choice: with fewer, none of
# them may have come without delay.
RECENT = 64


class Clocks:
    """The clocks of the ranks' machines. `machines` has the number of each rank's machine; the caller's is 0.

    The clocks' offset is taken from the recent answer of a machine with the shortest transit. Converted times are too
    late by that transit.
    """

    def __init__(self, machines: Sequence[int]) -> None:
        self._machines = machines
        self._apart: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def by_ours(self, rank: int, answer: Answer, arrived: float) -> Answer:
        """A rank's answer with its times by our clock. It arrived at the time `arrived` of our clock."""
        machine = self._machines[rank]
        if machine == 0:
            return answer
        apart = self._apart[machine]
        apart.append(arrived - answer.end)
        more = min(apart)
        spans = tuple((step, start + more, end + more) for step, start, end in answer.spans)
        return msgspec.structs.replace(answer, start=answer.start + more, end=answer.end + more, spans=spans)


# A message, and the arrays that it comes with.
Parcel = tuple[Any, Any]
# Seconds between two looks at what other ranks have sent while rank 0's thread works, which needs Python's lock. A
# choice: a look more often would take the lock more often, and an answer waits a millisecond at most.
LOOK = 1e-3


class MpiWire:
    """The session's end, in process 0. If that is rank 0 of these too, `own` is its control.

    `machines` has the number of each rank's machine, and the first rank is process `first`. When rank 0 has answered,
    others' answers are busy-waited for, for `spin` seconds.
    """

    def __init__(
        self, messenger: Messenger, machines: Sequence[int], own: OwnControl | None, spin: float, first: int = 0
    ) -> None:
        self._messenger = messenger
        self._first = first
        self._alive = list(range(len(machines)))
        self._clocks = Clocks(machines)
        self._own = own
        self._spin = spin
        # Requests that rank 0 has not answered.
        self._own_due = 0
        self._outputs: dict[int, Mapping[str, Array]] = {}

    def order(self, order: Order, feeds: Arrays, initial: Arrays) -> None:
        arrays = dict(feeds), dict(initial)
        for rank in self._others:
            try:
                self._messenger.send(self._first + rank, (order, arrays))
            except Exception as error:  # others have it
                raise HandOverError(f"rank {rank} could not be given a request: {error!r}") from error
        if self._own is not None:
            self._own_due += 1
            self._own.inbox.put((order, arrays))

    def send(self, message: Message | AllLoaded | Stop) -> None:
        for rank in self._others:
            with contextlib.suppress(Exception):  # the others are told: a session that breaks could not end otherwise
                self._messenger.send(self._first + rank, (message, None))
        if self._own is not None:
            self._own.inbox.put((message, None))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._alive if rank or self._own is None]

    def outputs(self, rank: int, shared: SharedArrays | None) -> dict[str, Array]:
        return dict(self._outputs.pop(rank, {}))

    def is_ready(self) -> bool:
        return (self._own is not None and not self._own.outbox.empty()) or self._messenger.is_ready()

    def take(self, seconds: float) -> list[tuple[int, Any]]:
        begin, waited = time.perf_counter(), 0.0
        while waited <= seconds:
            if (parcel := self._take_own()) is not None:
                return [self._opened(0, parcel)]
            if (arrived := self._messenger.receive(seconds=0.0)) is not None:
                process, message = arrived
                return [self._opened(process - self._first, message)]
            if not self._own_due and waited >= self._spin:
                sleep_after(waited)
            waited = time.perf_counter() - begin
        return []

    def _take_own(self) -> Parcel | None:
        """What rank 0 has sent. While its thread works, the wait releases Python's lock, which that needs."""
        if self._own is None:
            return None
        try:
            return self._own.outbox.get(timeout=LOOK) if self._own_due else self._own.outbox.get_nowait()
        except Empty:
            return None

    def _opened(self, rank: int, parcel: Parcel) -> tuple[int, Any]:
        message, arrays = parcel
        if isinstance(message, Left):
            self._alive.remove(rank)
            return rank, LOST
        if isinstance(message, Answer):
            self._own_due -= rank == 0 and self._own is not None
            self._outputs[rank] = arrays
            message = self._clocks.by_ours(rank, message, time.perf_counter())
        return rank, message

    @property
    def alive(self) -> Sequence[int]:
        return list(self._alive)


class MpiControl:
    """The end of a rank in a process of its own. It busy-waits for work for `spin` seconds, if it may.

    `closed` says whether the session was closed, after all requests, by all ranks.
    """

    closed = False

    def __init__(self, messenger: Messenger, spin: float = 0.0) -> None:
        self._messenger = messenger
        self._spin = spin

    def receive(self, spins: bool) -> Message:
        message, self._arrays = self._receive(spins)
        if isinstance(message, AllLoaded):
            # All ranks have opened NCCL's shared memory, whose names would be left behind if the job was killed.
            remove_files(find_mapped(os.getpid(), NCCL))
            return self.receive(spins)
        self.closed = message is None
        return message  # type: ignore[no-any-return]

    def _receive(self, spins: bool) -> Parcel:
        arrived = self._messenger.receive(0, spin=self._spin if spins else 0.0)
        assert arrived is not None
        parcel: Parcel = arrived[1]
        return parcel

    def arrays(self, order: Order) -> tuple[dict[str, Array], dict[str, Array]]:
        feeds, initial = self._arrays
        return feeds, initial

    def lent(self) -> int:
        return 0

    def send(self, message: Message | Left) -> None:
        self._messenger.send(0, (message, None))

    def answer(self, answer: Answer, outputs: Mapping[str, Array]) -> None:
        self._messenger.send(0, (answer, dict(outputs)))

    def allocator(self, backend: Backend) -> Allocate | None:
        return None


class OwnControl(MpiControl):
    """The end of rank 0, which runs on a thread of the session's process."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Parcel] = SimpleQueue()
        self.outbox: SimpleQueue[Parcel] = SimpleQueue()

    def _receive(self, spins: bool) -> Parcel:
        return self.inbox.get()

    def send(self, message: Message | Left) -> None:
        self.outbox.put((message, None))

    def answer(self, answer: Answer, outputs: Mapping[str, Array]) -> None:
        self.outbox.put((answer, outputs))


class MpiMail:
    """A rank's mail in the session of this number: see Mail. `processes` are those of the ranks, in order."""

    def __init__(self, messenger: Messenger, session: int, processes: Sequence[int]) -> None:
        self._messenger = messenger
        self._session = session
        self._processes = processes

    def tell(self, target: int, label: Label, value: Any) -> None:
        # A rank goes on at once, and may write to its arrays while MPI still reads from them.
        self._messenger.send(self._processes[target], (self._session, label, _copied(value)))

    def hear(self, source: int) -> tuple[Label, Any]:
        while True:
            arrived = self._messenger.receive(self._processes[source])
            assert arrived is not None
            session, label, value = arrived[1]
            if session == self._session:  # drop those of a session that could not be opened
                return label, value


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value
