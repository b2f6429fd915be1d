"""One request in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from splitc.runtime.adapters.held import HeldSum
from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.errors import FollowingError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.ranks.loop import Span


@dataclass(frozen=True)
class Execution:
    """A request on one rank.

    - `start`, `end`: when it began and ended there, in seconds of time.perf_counter.
    - `spans`: when its steps ran.
    - `grew`: whether a state of its sequence has changed its size.
    """

    start: float
    end: float
    spans: Sequence[Span]
    grew: bool = False


NEVER = Execution(0.0, 0.0, ())


def nothing_to_do(request: InFlightRequest) -> None:
    """The default callback at the end of a request: does nothing."""


@dataclass(eq=False)
class Cancellation:
    """Whether a request is cancelled, or begun by a rank. The request and all its parts share one."""

    started: bool = False
    cancelled: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Begin the request unless it is cancelled. Returns whether to run it: all ranks get the same answer."""
        with self._lock:
            self.started = self.started or self.cancelled is None
            return self.started

    def cancel(self, error: BaseException) -> bool:
        """Cancel the request with this error, unless a rank has begun it. Returns whether it is cancelled."""
        with self._lock:
            self.cancelled = self.cancelled or error
            return not self.started


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight. Each rank adds its outputs, and the last one calls `done`.

    - `sequence`: the number of its sequence.
    - `initial`: the sequence's initial values on the ranks: states that stay there, and feeds that never change.
    - `in_place`: the states have their full capacity, and are written in place.
    - `after`: the sequence that this one continues: its states are copied to the beginning of the longer `initial`.
    - `growth`: the number of the sequence's requests in which states grew on any rank.
    - `on_device`: outputs are CuPy arrays on the ranks' GPUs.
    - `adapters`: the sum of adapters for its slots.
    - `given`: the caller's own feeds, if those of the ranks differ.
    - `parts`: each replica's part of the request, with its own outputs, if replicas divide the rows.
    - `replica`: the replica of a part; None for any that is free.
    - `waiting`: the number of ranks that have not finished.
    - `number`: the request's number on all ranks.
    - `outputs`, `executions`: by rank.
    - `trace`: the span of the caller's tracer.
    """

    feeds: Mapping[str, Feed]
    sequence: int | None = None
    initial: Mapping[str, Array | Zeros] = field(default_factory=dict)
    in_place: bool = False
    after: int | None = None
    growth: int = 0
    on_device: bool = False
    adapters: HeldSum | None = None
    given: Mapping[str, Feed] | None = None
    parts: list[InFlightRequest] = field(default_factory=list)
    replica: int | None = None
    waiting: int = 1
    done: Callable[[InFlightRequest], None] = nothing_to_do
    number: int = 0
    outputs: dict[int, dict[str, Array]] = field(default_factory=dict)
    executions: dict[int, Execution] = field(default_factory=dict)
    error: BaseException | None = None
    submitted: float = field(default_factory=time.perf_counter)
    cancellation: Cancellation = field(default_factory=Cancellation)
    trace: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cancelled(self) -> BaseException | None:
        """The error that cancels it unless a rank has begun it; None if it is not cancelled."""
        return self.cancellation.cancelled

    def withdraw(self) -> bool:
        """Cancel it for its caller, who no longer waits for it. Returns whether it is cancelled."""
        return self.cancellation.cancel(CancelledError())

    def finish(
        self, rank: int, outputs: Mapping[str, Array], execution: Execution, error: BaseException | None
    ) -> None:
        """Record one rank's outputs or error. Later calls for the same rank are ignored."""
        with self.lock:
            if rank in self.outputs:
                return
            self.outputs[rank] = dict(outputs)
            self.executions[rank] = execution
            if self.error is None or (error is not None and isinstance(self.error, FollowingError)):
                self.error = error
            self.waiting -= 1
            if self.waiting:
                return
        self.done(self)
