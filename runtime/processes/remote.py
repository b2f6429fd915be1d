"""Ranks that are processes, from the session's side: it sends orders, and receives answers and reports."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Any

from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.errors import EngineError, HandOverError, PackageError
from splitc.runtime.feeds.on_gpu import on_host
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.processes.awake import AwakeClock
from splitc.runtime.processes.messages import (
    CAPTURED,
    Answer,
    Ask,
    BringIn,
    Broken,
    Ended,
    Forget,
    Loaded,
    Order,
    Report,
)
from splitc.runtime.processes.reader import LOOK, Reader
from splitc.runtime.processes.wire import LOST, Wire
from splitc.runtime.ranks.deployment import Deployment
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import Execution, InFlightRequest
from splitc.runtime.threads.futures import Awaited, first_error
from splitc.runtime.threads.interrupts import later_interrupts

# Seconds without a heartbeat after which a process counts as hanging, so that an error comes within 10; and before its
# first one, while Python starts (a choice: that takes a second or two). Only seconds in which the session's process was
# awake count, here and below.
PATIENCE, FIRST_PATIENCE = 8.0, 20.0
# Seconds that the other ranks get to fail in the same request as a rank whose collectives they may wait for. A choice:
# if all fail alike, they do so within a run's time; if not, the session breaks, within the 10 s that are promised.
GRACE = 2.0


class RemoteRanks(ABC):
    """The ranks of a package, each in its own process. `broken` is called once if a rank can't go on.

    Subclasses set `_wire` and `_reader` when they are started.
    """

    _wire: Wire
    _reader: Reader

    def __init__(self, deployment: Deployment, broken: Callable[[BaseException], None]) -> None:
        self._manifest = deployment.manifest
        self._devices = deployment.devices
        self._first = deployment.first
        self._broken = broken
        self._owner = os.getpid()
        self._requests: dict[int, InFlightRequest] = {}
        self._count = 0
        # The numbers of the sums of adapters that all ranks have.
        self._held: set[int] = set()
        # The request that each rank answers next.
        self._due = [0] * len(self._devices)
        # How long the last answer took.
        self._seconds = 0.0
        # None was put, and the processes end by themselves; they were all ended.
        self._closing = self._stopped = False
        self._clock = AwakeClock()
        # When the ranks were last looked at, by the system's clock and by this one, and how long each had been silent.
        self._last_look = self._looked = 0.0
        self._silences = [0.0] * len(self._devices)
        # When a rank said that it can't go on, the request that others may fail in too, and the error.
        self._suspect: tuple[float, int | None, BaseException] | None = None
        # Why all ranks are ended, when they are.
        self._why: BaseException = EngineError("its session was closed while a request ran")
        self._loaded: list[Future[None]] = [Future() for _ in self._devices]
        self._ended: set[int] = set()
        # What NCCL may leave behind.
        self._files: set[str] = set()
        # The reports that each rank owes, in the order in which it was asked: every thread that asks gets its own.
        self._owed: list[deque[Future[Report]]] = [deque() for _ in self._devices]

    def __len__(self) -> int:
        return len(self._devices)

    @abstractmethod
    def start(self) -> None:
        """Start all ranks, which then load their engines. If one can't start, all are ended."""

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded their engines. Raises the first error, PackageError for a bad package."""
        self._reader.wake()
        error = first_error(self._loaded, "loading ranks")
        if error is not None:
            raise error

    def put(self, request: InFlightRequest | None) -> None:
        """Give all ranks a request. None ends them after all earlier requests."""
        if request is None:
            self._closing = True
            self._wire.send(None)
            self._reader.wake()
            return
        if not request.cancellation.begin():
            assert request.cancelled is not None, "only this keeps a new one from beginning"
            raise request.cancelled
        number = self._count
        zeros = {name: value for name, value in request.initial.items() if isinstance(value, Zeros)}
        loaded = [(name, value) for name, value in request.initial.items() if not isinstance(value, Zeros)]
        how = request.sequence, request.in_place, request.after, request.growth
        adapters = request.adapters
        if adapters is not None and adapters.number not in self._held:
            loaded += adapters.arrays.items()
            self._held.add(adapters.number)  # before its answer may come: a rank that fails may not have the sum
        order = Order(number, None, 0, zeros, *how, None if adapters is None else adapters.number, ())
        self._requests[number] = request  # before its answer may come
        try:
            self._wire.order(order, [(name, on_host(feed)) for name, feed in request.feeds.items()], loaded)
        except HandOverError:
            raise  # some ranks will answer it
        except BaseException:
            del self._requests[number]
            if adapters is not None:
                self._held.discard(adapters.number)
            raise
        self._count += 1  # only now: those in flight have slots by their numbers, which follow each other

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence, or keep them for another one if `reusable`."""
        self._held.discard(sequence)
        self._wire.send(Forget(sequence, reusable))

    def bring_in(self) -> None:
        """Have all ranks copy swapped weights in, before later requests."""
        self._wire.send(BringIn())

    @property
    def notes(self) -> list[str]:
        """Messages of the ranks for the user."""
        return list(dict.fromkeys(note for report in self._ask() for note in report.notes))

    def device_memory(self) -> list[RankMemory]:
        """The memory of the ranks since loading."""
        return [report.memory for report in self._ask() if report.memory is not None]

    def _ask(self) -> list[Report]:
        """A report of each rank, after earlier requests. Empty if the session is broken, closed, or another process's.

        A forked process must not read the answers that the session waits for.
        """
        if self._stopped or self._closing or os.getpid() != self._owner:
            return []
        reports = [Awaited[Report]() for _ in self._devices]
        with later_interrupts():  # all are asked who owe one
            for owed, report in zip(self._owed, reports, strict=True):
                owed.append(report)
            self._wire.send(Ask())
        self._reader.wake()
        try:
            return [report.result(PATIENCE) for report in reports]
        except (EngineError, TimeoutError):
            return []

    def watch(self, future: Future[InFlightRequest] | None, request: InFlightRequest) -> None:
        """Read messages until a request's future is done, unless another thread does. None: have them read."""
        if future is None:
            self._reader.wake()
        else:
            self._reader.read_until(future, self._seconds)

    def _is_waiting(self) -> bool:
        """Whether messages of the ranks are awaited."""
        busy = bool(self._requests or self._suspect or self._closing) or any(self._owed)
        return busy or not all(loaded.done() for loaded in self._loaded)

    def _receive(self, patience: float) -> None:
        """Handle messages that have arrived, or arrive within `patience`, and check on the ranks every LOOK seconds."""
        try:
            for rank, message in self._wire.take(patience):
                if message is LOST:
                    self._lost(rank)
                else:
                    self._take(rank, message)
            now = time.monotonic()
            if now - self._last_look > LOOK:
                self._last_look = now
                self._look(self._wire.alive)
        except Exception as error:  # all who wait for an answer would wait for ever
            self._break(EngineError(f"what a rank sent can't be taken: {error}"))

    def _take(self, rank: int, message: Any) -> None:
        """Handle a rank's message. Messages of ranks that were ended are ignored: all waits for them have ended."""
        if self._stopped:
            return
        if isinstance(message, Answer):
            self._answered(rank, message)
        elif isinstance(message, Report):
            if self._owed[rank]:
                self._owed[rank].popleft().set_result(message)  # whoever asked may have given up
        elif isinstance(message, Loaded):
            self._files.update(message.files)
            self._loaded[rank].set_exception(message.error) if message.error else self._loaded[rank].set_result(None)
        elif isinstance(message, Broken):
            error = EngineError(f"{self._name(rank)} failed: {message.error}")
            self._suspect = self._suspect or (self._clock.read(), message.request, error)
        elif isinstance(message, Ended):
            self._ended.add(rank)

    def _answered(self, rank: int, answer: Answer) -> None:
        """Add one rank's outputs to a request.

        Raises HandOverError if another request was due: sums on GPUs have no numbers that would show this.
        """
        if answer.number != self._due[rank]:
            raise HandOverError(
                f"{self._name(rank)} answers request {answer.number} before request {self._due[rank]}: it has missed it"
            )
        self._due[rank] += 1
        outputs: dict[str, Array] = self._wire.outputs(rank, answer.outputs)
        steps = self._manifest.ranks[rank].program
        spans = [
            Span(steps[number] if number >= 0 else Replay(number == CAPTURED), start, end)
            for number, start, end in answer.spans
        ]
        request = self._requests[answer.number]
        self._seconds = answer.end - request.submitted
        if answer.error is not None and request.adapters is not None:
            self._held.discard(request.adapters.number)  # this rank may not have it: the next request brings it again
        if request.waiting == 1:
            del self._requests[answer.number]
        request.finish(rank, outputs, Execution(answer.start, answer.end, spans, answer.grew), answer.error)

    def _look(self, alive: Sequence[int]) -> None:
        """Break the session if a rank hangs, or has failed in a request that others complete."""
        now = self._clock.read()
        awake, self._looked = now - self._looked, now
        if self._suspect is not None:
            since, number, error = self._suspect
            if number is not None and number not in self._requests:
                self._suspect = None  # all ranks have failed alike, and can go on
            elif now - since > GRACE:
                self._break(error)
        for rank in alive:
            silent, patience = self._silent(rank)
            silent = self._silences[rank] = min(silent, self._silences[rank] + awake)
            if silent > patience:
                how = f"its process gave no sign of life for {silent:.0f} s"
                self._break(EngineError(f"{self._name(rank)} hangs: {how}"))

    @abstractmethod
    def _silent(self, rank: int) -> tuple[float, float]:
        """The seconds since a rank's last heartbeat, awake or not, and the limit."""

    def _break(self, error: BaseException) -> None:
        """End all ranks, and the session with this error."""
        if not self._stopped:
            self.abort(error)
            if all(future.done() and future.exception() is None for future in self._loaded):
                self._broken(error)
            for future in self._loaded:
                if not future.done():
                    future.set_exception(PackageError(str(error)))

    def _name(self, rank: int) -> str:
        return f"rank {self._first + rank} ({self._devices[rank]})"

    def abort(self, error: BaseException) -> None:
        """End all ranks, which may wait for each other."""
        self._why = error
        self.stop()
        for owed in self._owed:
            while owed:
                owed.popleft().set_exception(EngineError(str(error)))

    @abstractmethod
    def _lost(self, rank: int) -> None:
        """Handle the end of a rank's process."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks at once."""

    @abstractmethod
    def join(self, patience: float) -> bool:
        """Wait for the ranks to end, for at most `patience` seconds. Returns whether they have ended."""

    @abstractmethod
    def clear(self) -> None:
        """Release the ranks after they have ended."""
