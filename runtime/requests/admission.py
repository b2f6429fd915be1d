"""Admit requests to a session's ranks, and end them if the session breaks or is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

from splitc.runtime.errors import EngineError, HandOverError, MisuseError, SplitcError
from splitc.runtime.feeds.named_sizes import explain_failure
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.processes.remote import RemoteRanks
from splitc.runtime.ranks.request import NEVER, InFlightRequest
from splitc.runtime.ranks.workers import Workers
from splitc.runtime.requests.replicas import Replicas
from splitc.runtime.requests.telemetry import Telemetry
from splitc.runtime.requests.turns import CHECK_EVERY, Callbacks, Turn, Turns
from splitc.runtime.threads.futures import Awaited
from splitc.runtime.threads.interrupts import later_interrupts

# Seconds that a closing session waits for requests in flight before it stops their engines. A choice: a longer request
# fails, and a shorter wait would fail more.
PATIENCE = 10.0
# The most requests in flight. Each has its feeds, activations and outputs in memory. A choice: far more than any
# machine holds, so that a number with too many digits is refused in words.
MOST_AT_ONCE = 10_000


class _SignalCame(Exception):
    """A signal waits for its handler, which runs once no wait holds it back."""


class Admission:
    """Gives requests to the ranks, at most `in_flight` at a time.

    In a pipeline whose models work in turn, requests wait for their model's turn.
    """

    def __init__(
        self,
        workers: Workers | RemoteRanks | Replicas,
        manifest: Manifest,
        in_flight: int,
        telemetry: Telemetry,
        turns: Turns | None,
    ) -> None:
        self._workers = workers
        self._telemetry = telemetry
        self._places = threading.BoundedSemaphore(in_flight)
        self._inputs = manifest.inputs
        self._turn = None if turns is None else Turn(turns, workers.bring_in)
        self._closed = False
        self._closing = threading.Lock()
        self._failure: BaseException | None = None
        # Requests have no reference to their futures, which refer to them: in such a cycle outputs would only be freed
        # by the garbage collector, which counts objects rather than bytes.
        self._under_way: dict[InFlightRequest, Future[InFlightRequest]] = {}
        # All ranks must get requests in the same order, since values of different requests have the same names.
        self._order = threading.Lock()
        self._owner = os.getpid()
        self._callbacks = Callbacks()

    def submit(self, request: InFlightRequest, here: bool) -> Future[InFlightRequest]:
        """Start a request, and set its `waiting` and `done`. Waits while `in_flight` requests are in flight.

        With `here`, this thread reads the answers of processes until the request is done. Raises SplitcError if the
        session is broken or closed, or belongs to another process; MisuseError in a callback of a request if it would
        wait for another request.
        """
        if os.getpid() != self._owner:
            raise EngineError("a forked process can't use the session of its parent: open one of its own")
        if here:
            self.check_may_wait()
        request.waiting, request.done = len(self._workers), self._done
        future: Future[InFlightRequest] = Awaited()
        self._hand_over(request, future)
        self._workers.watch(future if here else None, request)
        return future

    def check_may_wait(self) -> None:
        """Raise MisuseError in a callback of a request, which can't wait for another one."""
        if self._callbacks.active:
            raise MisuseError("a callback of a request can't wait for another one: use submit(), or another thread")

    def _hand_over(self, request: InFlightRequest, future: Future[InFlightRequest]) -> None:
        """Give a request to all ranks.

        Signals are held back meanwhile: if only some ranks had the request, later requests would get its values. Raises
        as `submit` does.
        """
        while True:
            with later_interrupts() as interrupted:
                try:
                    self._admit(request, future, partial(self._check_waiting, request, interrupted))
                    return
                except _SignalCame:
                    pass  # its handler runs at the end of this block, and may raise
                except HandOverError as error:
                    self.fail(error)
                    raise

    def _check_waiting(self, request: InFlightRequest, interrupted: Callable[[], bool]) -> None:
        """Raise what ends a wait: SplitcError if the session is broken or closed, CancelledError, _SignalCame."""
        self.check_usable()
        if request.cancelled is not None:
            raise request.cancelled
        if interrupted():
            raise _SignalCame

    def _admit(self, request: InFlightRequest, future: Future[InFlightRequest], check: Callable[[], None]) -> None:
        """Wait for a place for a request and for its model's turn, and give it to the ranks.

        On an error, both the place and the turn are free again.
        """
        in_callback = self._callbacks.active
        check()
        while not self._places.acquire(timeout=0 if in_callback else CHECK_EVERY):
            if in_callback:
                raise MisuseError(
                    "too many requests are in flight for a callback to submit another one: raise in_flight"
                )
            check()
        if self._turn is not None:
            try:
                self.check_usable()
                self._turn.turns.begin(self._turn, check)
            except BaseException:
                self._places.release()
                raise
        with self._order:
            try:
                self.check_usable()
                self._under_way[request] = future
                self._telemetry.begin(request)
                self._workers.put(request)
            except BaseException as error:
                if self._under_way.pop(request, None) is not None:
                    self._telemetry.end(request, error)
                self._leave()
                raise

    def _leave(self) -> None:
        """Free the place of a request that has ended."""
        if self._turn is not None:
            self._turn.turns.end(self._turn)
        self._places.release()

    def _done(self, request: InFlightRequest) -> None:
        """Set a request's result, once all ranks have finished it."""
        future = self._under_way.pop(request)
        self._telemetry.end(request, request.error)
        self._leave()
        with self._callbacks, self._turn.turns.callbacks if self._turn else nullcontext():
            if request.error is not None:
                future.set_exception(explain_failure(request.error, request.given or request.feeds, self._inputs))
            else:
                future.set_result(request)

    def check_usable(self) -> None:
        """Raise SplitcError if the session is broken or closed."""
        if not self.usable:
            raise self._unusable()

    @property
    def usable(self) -> bool:
        """Whether the session is neither broken nor closed."""
        return not self._closed and self._failure is None

    def _unusable(self) -> SplitcError:
        if self._failure is not None:
            return SplitcError(f"the session is broken: {type(self._failure).__name__}: {self._failure}")
        return SplitcError("the session is closed")

    def fail(self, error: BaseException) -> None:
        """Break the session: a rank has died, so all waits for it end with an error."""
        if self._failure is None:
            self._failure = error
            self._telemetry.broken(error)
        with self._order:
            waiting = list(self._under_way)
        for request in waiting:
            for number in range(len(self._workers)):
                request.finish(number, {}, NEVER, self._unusable())
        self._workers.abort(error)  # now: what the other ranks say then only follows from it

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence, or keep them for another one if `reusable`."""
        if os.getpid() != self._owner:
            return
        with later_interrupts(), self._order:  # all ranks, or none
            self._workers.forget(sequence, reusable)

    def close(self) -> None:
        """End the ranks, in bounded time. Requests that have begun are completed or stopped; others are cancelled.

        In a callback of a request, which the ranks wait for, another thread does this. Does nothing in another process
        than the session's.
        """
        if os.getpid() != self._owner:
            return
        if self._callbacks.active:
            threading.Thread(target=self.close, name="splitc closes").start()
            return
        with later_interrupts():  # or else some of it would be left
            self._close()

    def _close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True  # first of all, since threads that wait check it
        with self._order:
            for request in list(self._under_way):  # a copy, since requests end meanwhile
                request.cancellation.cancel(SplitcError("the session was closed before this request ran"))
            self._workers.put(None)
        if not self._workers.join(PATIENCE):
            self._workers.stop()
            self.fail(SplitcError("the session was closed while this request ran"))
            self._workers.join(1.0)
        self._workers.clear()
