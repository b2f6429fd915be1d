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
from splitc.runtime.errors import FollowingError, SplitcError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.ranks.loop import Span


@dataclass(frozen=True)
class Execution:
    """A request on one rank: when it began and ended there, in seconds of time.perf_counter, and when its steps ran.

    `grew` says that a state of its sequence has another size than before.
    """

    start: float
    end: float
    spans: Sequence[Span]
    grew: bool = False


NEVER = Execution(0.0, 0.0, ())


def closed_before() -> SplitcError:
    """The error of a request that the end of its session cancels."""
    return SplitcError("the session was closed before this request ran")


def nothing_to_do(request: InFlightRequest) -> None:
    """What is done once a request has ended that nobody waits for."""


@dataclass(eq=False)
class Fate:
    """Whether a request will run: it is cancelled, or a rank has begun it. One for a request and all of its parts."""

    started: bool = False
    cancelled: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Whether to run it. All who ask get the same answer: after one has begun, it can't be cancelled."""
        with self._lock:
            self.started = self.started or self.cancelled is None
            return self.started

    def cancel(self, error: BaseException) -> bool:
        """Let it end with this error, unless a rank has begun. Returns whether it will not run."""
        with self._lock:
            self.cancelled = self.cancelled or error
            return not self.started


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight. Each rank adds its outputs, and the last one calls `done`.

    `sequence` is the number of the request's sequence, `initial` what the sequence begins with on the ranks: the states
    that stay there, and feeds that are the same in all its requests. With `in_place`, the states have their full
    capacity, and are written in place. With `after`, the sequence goes on from that one: its states are copied into the
    beginning of `initial`, which are longer. `growth` counts the requests of the sequence in which states grew on any
    rank. With `on_device`, outputs are arrays of CuPy on the ranks' GPUs. `adapters` are those of its slots. `given`
    are the caller's own feeds, where the ranks' are others.

    Where several replicas divide the rows, `parts` are what each of them has of the request, with its own outputs, and
    `replica` says of such a part whose it is; None for whichever is free.

    `waiting` is the number of ranks that have not finished, `number` what all ranks know the request by. `outputs` and
    `executions` are by rank. `trace` is the caller's span, in whatever traces it.
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
    fate: Fate = field(default_factory=Fate)
    trace: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cancelled(self) -> BaseException | None:
        """The error that it ends with if no rank has begun it."""
        return self.fate.cancelled

    def withdraw(self) -> bool:
        """Cancel it for its caller, who waits for it no more. Returns whether it will not run."""
        return self.fate.cancel(CancelledError())

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
