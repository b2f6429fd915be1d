"""The recordings of a session: which requests are recorded and replayed, and which recordings are dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.request import NEVER, InFlightRequest, Served, closed_before
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.kept import KeptRecordings, Kind, fit, kind_of
from splitc.runtime.replay.recording import Recording, States, record, states_of

# The identity of a sequence's states, and the kind of a request. A recording is for one of each.
Places = tuple[int, ...]
Key = tuple[Places, Kind]


class Recordings:
    """A session's recordings. `lock` is held while a request is replayed, one at a time.

    `behind` says that streams may have unfinished eager work, which a replay must wait for. `blocker` says why nothing
    can be captured, or is None. `check` raises if the session is broken or closed, which ends waits.
    """

    def __init__(self, workers: Sequence[Worker], check: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._check = check
        self.behind = False
        self.blocker = next((worker.capture_blocker for worker in workers if worker.capture_blocker), None)
        self._workers = workers
        self._kept: KeptRecordings[Recording, States] = KeptRecordings()

    def adopt(self, request: InFlightRequest) -> None:
        """Give a new sequence the states of an ended one, if the shapes fit, so that recordings can be reused."""
        if not all(isinstance(each, Zeros) for each in request.initial.values()):
            return
        states = self._kept.take_spare(partial(self._fit, request))
        if states is None:
            return
        for worker, own in zip(self._workers, states, strict=True):
            gpu = worker.backend
            assert isinstance(gpu, GpuDevice)
            with gpu.device:
                gpu.clear(own.values())
            worker.sequences[request.sequence] = own
        request.initial = {}
        self.behind = True

    def _fit(self, request: InFlightRequest, states: States) -> bool:
        """Whether the states have the shapes and types of the sequence's initial states."""
        names = {name for own in states for name in own}
        pairs = zip(self._workers, states, strict=True)
        return set(request.initial) == names and all(fit(worker, request, own) for worker, own in pairs)

    def takes(self, request: InFlightRequest) -> Key | None:
        """The key of the request's recording, if it is to be replayed: its shapes were seen before. None otherwise."""
        self._kept.requests += 1
        if self.blocker is not None or request.initial:
            return None
        states = states_of(self._workers, request.sequence)
        places, kind = _places(states), kind_of(request, states)
        return (places, kind) if self._kept.has(places, kind) or self._kept.is_worth(kind) else None

    def find(self, request: InFlightRequest, key: Key) -> Recording | None:
        """The recording for the request, which is made if there is none; None if the request can't be captured.

        Nothing else may run at the same time.
        """
        known = self._kept.pop(*key)
        if known is None:
            try:
                known = record(self._workers, request, self._check)
            except Exception as error:  # of an engine, CuPy or CUDA: the request can still run eagerly
                self.blocker = str(error)
                return None
        self._kept.keep(*key, known)
        return known

    def forget(self, sequence: int) -> None:
        """End a sequence. If there are recordings for its states, these are kept for another sequence."""
        states = states_of(self._workers, sequence)
        self._kept.forget(_places(states), states)

    def end(self, patience: float) -> None:
        """Drop all recordings once none is being replayed. Gives up after `patience` seconds."""
        if self.lock.acquire(timeout=patience):
            self._kept.clear()
            self.lock.release()

    def play(self, request: InFlightRequest, recording: Recording) -> None:
        """Replay the request, and give it its outputs or the error."""
        with self.lock:
            if not request.begin():
                for worker in self._workers:
                    request.finish(worker.number, {}, NEVER, closed_before())
                return
            start = time.perf_counter()
            played = attempt(partial(self._launch, request, recording))
            end = time.perf_counter()
        if isinstance(played, Failure):
            for worker in self._workers:
                request.finish(worker.number, {}, Served(start, end, ()), played.error)
            return
        outputs, span = played
        for worker, own in zip(self._workers, outputs, strict=True):
            request.finish(worker.number, own, Served(start, end, [span]), None)

    def _launch(self, request: InFlightRequest, recording: Recording) -> tuple[list[dict[str, Array]], Span]:
        if self.behind:
            recording.wait_for(self._workers)
            self.behind = False
        return recording.launch(self._workers, request)


def _places(states: States) -> Places:
    """The identity of the ranks' states, which is valid as long as they are alive."""
    return tuple(map(id, states))
