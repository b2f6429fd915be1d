"""The recordings of a session: which requests are recorded, which are replayed, and which go when there are many."""

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

# What tells sequences' states from others, and what tells requests apart.
Places = tuple[int, ...]
Kind = tuple[Any, ...]
Key = tuple[Places, Kind]
# Recordings that a session keeps, and kinds of requests of which it remembers that they were seen.
MOST, REMEMBERED = 8, 64
# Sequences that have ended whose states are kept for new ones.
FREE = 2
# Requests of other kinds after which a recording is not in use any more.
IDLE = 64


class Recordings:
    """What a session has recorded. One request at a time is replayed: `lock` is held meanwhile.

    `behind` is set when streams were given eager work, with which they may not be done yet. `blocker` says why nothing
    can be captured, if that is so.
    `check` raises when the session is broken or closed, so that nobody waits any longer.
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
        # States of sequences that have ended.
        self._free: dict[Places, States] = {}

    def adopt(self, request: InFlightRequest) -> None:
        """Give a new sequence the states of one that has ended, which graphs know, where they are of its shapes."""
        if not all(isinstance(each, Zeros) for each in request.initial.values()):
            return
        states = next((states for states in self._free.values() if self._fit(request, states)), None)
        if states is None:
            return
        del self._free[_places(states)]
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
        """Whether the states are of the shapes that the sequence begins with."""
        if set(request.initial) != {name for own in states for name in own}:
            return False
        pairs = [
            (worker.cut_initial(name, request), own[name])
            for worker, own in zip(self._workers, states, strict=True)
            for name in own
        ]
        return all(initial.shape == state.shape and str(initial.dtype) == state.dtype for initial, state in pairs)

    def takes(self, request: InFlightRequest) -> Key | None:
        """What to find the request's recording by, if it is to be replayed: its shapes were seen before."""
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
        """The recording for the request, which is made now if it is not there; None where that can't be.

        Nothing else may run meanwhile.
        """
        known = self._kept.pop(key, None)
        if known is None:
            try:
                known = record(self._workers, request, self._check)
            except Exception as error:  # of engines, CuPy, CUDA: the request may still run eagerly
                self.blocker = str(error)
                return None
        known.last = self._requests
        self._kept[key] = known
        if len(self._kept) > MOST:
            self._drop(next(iter(self._kept))[0], 1)
        return known

    def _has_room(self) -> bool:
        """Whether another recording may be made. One that is in use does not go for it: more sequences than recordings
        would else make each step record.
        """
        oldest = next(iter(self._kept.values()), None)
        return len(self._kept) < MOST or oldest is None or self._requests - oldest.last > IDLE

    def forget(self, sequence: int) -> None:
        """A sequence has ended. Another one may have its states, where a graph knows them."""
        states = states_of(self._workers, sequence)
        places = _places(states)
        if any(known == places for known, _ in self._kept):
            self._free[places] = states
        if len(self._free) > FREE:
            self._drop(next(iter(self._free)), MOST)

    def _drop(self, places: Places, count: int) -> None:
        """Let so many recordings with these states go, the oldest first."""
        for key in [key for key in self._kept if key[0] == places][:count]:
            del self._kept[key]
        if not any(known == places for known, _ in self._kept):
            self._free.pop(places, None)

    def end(self, patience: float) -> None:
        """Let the recordings go when none is being replayed any more, or after so many seconds."""
        if self.lock.acquire(timeout=patience):
            self._kept.clear()
            self._free.clear()
            self.lock.release()

    def play(self, request: InFlightRequest, recording: Recording) -> None:
        """Replay the request; it gets its outputs, or the error."""
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
    """What tells the ranks' states from others, as long as they are there."""
    return tuple(map(id, states))


def _kind(request: InFlightRequest, states: States) -> Kind:
    """What requests have in common of which engines do the same; of a sequence also how long its states are."""
    shapes = [(name, array.shape) for name, array in request.feeds.items()]
    shapes += [(name, own[name].shape) for own in states for name in list(own)[:1]]
    return request.sequence is None, request.room, *shapes
