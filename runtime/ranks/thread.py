"""The thread of one rank: it loads the rank's engines and runs its program for each request, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from splitc.runtime.arrays.array import Allocate, Array
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.engines import Backend
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.ranks.computation import Computation, Ran
from splitc.runtime.ranks.loaded import Setup, load_rank, reserve
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.replays import RankReplays, not_replayed
from splitc.runtime.ranks.request import NEVER, Execution, InFlightRequest
from splitc.runtime.threads.failures import Failure, attempt, clear_frames
from splitc.runtime.threads.futures import Executor

# A request, a function to call, or None at the end.
Work = InFlightRequest | Callable[[], None] | None


class Worker(threading.Thread):
    """The thread of one rank of a session.

    - `requests`: a queue of requests, functions to call on the thread, and None to end it, in order.
    - `next_request`: replaces this queue.
    - `broken`: called if the thread itself fails, not just a request.
    - `replays_with`: None if requests are not replayed as CUDA graphs; otherwise all ranks, which must agree on
      replays, or empty for a single rank.
    - `allocate`: returns the arrays that a GPU writes outputs to, if given.
    - `capture_blocker`: set after loading: why the rank's work can't be captured; None if it can.
    """

    def __init__(
        self,
        setup: Setup,
        backend: Backend,
        collectives: Collectives,
        broken: Callable[[BaseException], None],
        replays_with: Sequence[int] | None = None,
        next_request: Callable[[], Work] | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        super().__init__(name=f"splitc rank {setup.number} ({setup.rank.device})", daemon=True)
        self.requests: SimpleQueue[Work] = SimpleQueue()
        self._next_request = next_request or self.requests.get
        self._setup, self._collectives, self._allocate = setup, collectives, allocate
        self.backend = backend
        self._broken = broken
        self._replays_with = replays_with
        # Recordings of requests as CUDA graphs, once the engines are loaded.
        self.replays: RankReplays | None = None
        self.ready: Future[None] = Future()
        self.capture_blocker: str | None = None
        # Waits for results of an asynchronous device on another thread, so that this one can launch the next request.
        self._finisher = Executor(1) if backend.asynchronous else None
        self._unfinished: Future[None] | None = None

    def run(self) -> None:
        try:
            self._loaded = load_rank(self._setup, self.backend, self._collectives)
            self.capture_blocker = self._loaded.capture_blocker
            self.computation = Computation(self._setup, self._loaded, self.backend, self._collectives, self._allocate)
            if self._replays_with is not None:
                self.replays = RankReplays(self._setup.manifest, self.computation, self._replays_with)
        except BaseException as error:  # the session waits for this
            attempt(self._leave)  # a GPU that has failed may fail again, of which the session knows enough
            clear_frames(error)  # with the engines that were loaded
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._serve_next():
                pass
        except BaseException as error:  # a thread has no caller: the session must know that it is gone
            self._broken(error)
        finally:
            self.computation.sequences.clear()
            self.computation.adapters.clear()
            self._leave()
            self.replays = None
            del self.computation, self._loaded

    def _leave(self) -> None:
        """Free memory on this thread, which has the device, rather than in the garbage collector."""
        if self.replays is not None:
            self.replays.clear()
        if self._finisher is not None:
            self._finisher.shutdown()
        self.backend.detach()

    def _serve_next(self) -> bool:
        """Run the next request, and keep no reference to it. Returns False at the end."""
        request = self._next_request()
        self.backend.attach()  # a callback of the request before may have made another GPU or stream current here
        if isinstance(request, InFlightRequest):
            if request.cancellation.begin():
                self.backend.begin_request()
                self._serve(request)
                self.backend.end_request()
            else:
                request.finish(self._setup.number, {}, NEVER, request.cancelled)
        elif request is not None:
            request()
        return request is not None

    def bring_in(self) -> None:
        """Copy swapped weights in, and reserve memory again that other models may have taken."""
        self.backend.bring_in()
        reserve(self._setup, self.backend)

    def device_memory(self) -> RankMemory | None:
        """See LoadedRank.memory."""
        return self._loaded.memory(self._setup.rank, self.backend.memory())

    def _serve(self, request: InFlightRequest) -> None:
        start = time.perf_counter()
        self._collectives.begin(request.number)
        runs = self._loaded.begin(request.number)
        ran = attempt(partial(self._replay, request))
        replayed = ran is not None
        if ran is None:
            ran = attempt(partial(self.computation.run, request))
        # At once: this thread goes on with the next request, while others may still wait for it in this one. A replay
        # does not walk the program, in which others are sent a failure in place of values.
        alone = not isinstance(ran, Failure) or (self._loaded.fail(runs) and not (replayed and self._replays_with))
        if replayed or self._finisher is None:
            self._drain()  # also where the replay failed before it did so
            self._finish(request, runs, start, ran, alone)
        else:
            self._unfinished = self._finisher.submit(self._finish_elsewhere, request, runs, start, ran, alone)

    def _replay(self, request: InFlightRequest) -> Ran | None:
        """Replay the request, if it can be."""
        if self.replays is None or self.capture_blocker is not None:
            return None
        played = self.replays.play(request, self._drain)
        return None if played is None else (lambda: played[0], [played[1]], False)

    def _finish(
        self, request: InFlightRequest, runs: Sequence[int], start: float, ran: Ran | Failure, alone: bool
    ) -> None:
        """Give the request its outputs or its error. `runs` are its numbers in the collectives.

        If it fails but not `alone`, other ranks may wait for this one for ever, so the session is broken.
        """
        made: Any = ran
        spans: Sequence[Span] = ()
        grew = False
        if not isinstance(ran, Failure):
            wait, spans, grew = ran
            made = attempt(partial(self._take, wait))
        execution = Execution(start, time.perf_counter(), spans, grew)
        if not isinstance(made, Failure):
            request.finish(self._setup.number, made, execution, None)
            return
        request.finish(self._setup.number, {}, execution, made.error)
        if not (alone and self._loaded.fail(runs)):
            self._broken(made.error)

    def _finish_elsewhere(self, *request: Any) -> None:
        """As `_finish`, on another thread. An error there would go unseen, so it breaks the session."""
        try:
            self._finish(*request)
        except BaseException as error:
            self._broken(error)

    def _take(self, wait: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """The outputs, if no collective failed."""
        made = wait()
        self._loaded.check()
        return made

    @property
    def notes(self) -> list[str]:
        """Messages for the user about the engines and replay."""
        if self.replays is None:
            return list(self.backend.notes)
        why = self.capture_blocker
        return [*self.backend.notes, *(self.replays.notes if why is None else [not_replayed(why)])]

    @property
    def has_unfinished(self) -> bool:
        """Whether another thread waits for outputs of this rank."""
        return self._unfinished is not None and not self._unfinished.done()

    def _drain(self) -> None:
        """Wait until all earlier requests have their outputs, so that requests finish in order."""
        if self._unfinished is not None:
            self._unfinished.result()
            self._unfinished = None

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence, or keep them for another one if `reusable`.

        Or free the sum of adapters with this number.
        """
        if self.replays is not None:
            self.replays.forget(sequence, reusable)
        self.computation.forget(sequence)
