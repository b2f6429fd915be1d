"""The recordings of a session: which requests are recorded and replayed, and which recordings are dropped."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.request import NEVER, InFlightRequest, Served, closed_before
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.recording import Recording, States, record, states_of

# The identity of a sequence's states, and the kind of a request. A recording is for one of each.
Places = tuple[int, ...]
Kind = tuple[Any, ...]
Key = tuple[Places, Kind]
# The most recordings that a session keeps, and the most kinds of requests that it remembers as seen.
MOST, REMEMBERED = 8, 64
# The most ended sequences whose states are kept for new ones.
MOST_SPARE = 2
# A recording is unused if this many requests came since its last replay.
IDLE = 64


class Recordings:
    """A session's recordings. `lock` is held while a request is replayed, one at a time.

    `behind` says that streams may have unfinished eager work, which a replay must wait for. `blocker` says why nothing
    can be captured, or is None. `check` raises if the session is broken or closed, which ends waits.
    """

    def __init__(self, workers: Sequence[Worker], check: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._check = check
        self.behind = False
        self._requests = 0
        self.blocker = next((worker.capture_blocker for worker in workers if worker.capture_blocker), None)
        self._workers = workers
        self._kept: OrderedDict[Key, Recording] = OrderedDict()
        self._seen: OrderedDict[Kind, None] = OrderedDict()
        # States of ended sequences, for which there are recordings.
        self._spare: dict[Places, States] = {}

    def adopt(self, request: InFlightRequest) -> None:
        """Give a new sequence the states of an ended one, if the shapes fit, so that recordings can be reused."""
        if not all(isinstance(each, Zeros) for each in request.initial.values()):
            return
        states = next((states for states in self._spare.values() if self._fit(request, states)), None)
        if states is None:
            return
        del self._spare[_places(states)]
        for worker, own in zip(self._workers, states, strict=True):
            gpu = worker.backend
            assert isinstance(gpu, GpuDevice)
            with gpu.device:
                for state in own.values():
                    gpu.clear(state)
            worker.sequences[request.sequence] = own
        request.initial = {}
        self.behind = True

    def _fit(self, request: InFlightRequest, states: States) -> bool:
        """Whether the states have the shapes and types of the sequence's initial states."""
        if set(request.initial) != {name for own in states for name in own}:
            return False
        pairs = [
            (worker.cut_initial(name, request), own[name])
            for worker, own in zip(self._workers, states, strict=True)
            for name in own
        ]
        return all(initial.shape == state.shape and str(initial.dtype) == state.dtype for initial, state in pairs)

    def takes(self, request: InFlightRequest) -> Key | None:
        """The key of the request's recording, if it is to be replayed: its shapes were seen before. None otherwise."""
        self._requests += 1
        if self.blocker is not None or request.initial:
            return None
        states = states_of(self._workers, request.sequence)
        kind = _kind(request, states)
        key = _places(states), kind
        if key in self._kept:
            return key
        known = kind in self._seen
        self._seen[kind] = None
        self._seen.move_to_end(kind)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return key if known and self._has_room() else None

    def find(self, request: InFlightRequest, key: Key) -> Recording | None:
        """The recording for the request, which is made if there is none; None if the request can't be captured.

        Nothing else may run at the same time.
        """
        known = self._kept.pop(key, None)
        if known is None:
            try:
                known = record(self._workers, request, self._check)
            except Exception as error:  # of an engine, CuPy or CUDA: the request can still run eagerly
                self.blocker = str(error)
                return None
        known.last = self._requests
        self._kept[key] = known
        if len(self._kept) > MOST:
            self._drop(next(iter(self._kept))[0], 1)
        return known

    def _has_room(self) -> bool:
        """Whether another recording may be made. Recordings in use are not dropped for it.

        Otherwise, with more sequences than recordings, each step would make a new recording.
        """
        oldest = next(iter(self._kept.values()), None)
        return len(self._kept) < MOST or oldest is None or self._requests - oldest.last > IDLE

    def forget(self, sequence: int) -> None:
        """End a sequence. If there are recordings for its states, these are kept for another sequence."""
        states = states_of(self._workers, sequence)
        places = _places(states)
        if any(known == places for known, _ in self._kept):
            self._spare[places] = states
        if len(self._spare) > MOST_SPARE:
            self._drop(next(iter(self._spare)), MOST)

    def _drop(self, places: Places, count: int) -> None:
        """Drop up to `count` recordings with these states, the oldest first."""
        for key in [key for key in self._kept if key[0] == places][:count]:
            del self._kept[key]
        if not any(known == places for known, _ in self._kept):
            self._spare.pop(places, None)

    def end(self, patience: float) -> None:
        """Drop all recordings once none is being replayed. Gives up after `patience` seconds."""
        if self.lock.acquire(timeout=patience):
            self._kept.clear()
            self._spare.clear()
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


def _kind(request: InFlightRequest, states: States) -> Kind:
    """A key that is equal for requests with the same work: their shapes, and the lengths of a sequence's states."""
    shapes = [(name, array.shape) for name, array in request.feeds.items()]
    shapes += [(name, own[name].shape) for own in states for name in list(own)[:1]]
    return request.sequence is None, request.room, *shapes
