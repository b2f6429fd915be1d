"""Requests as CUDA graphs: what all GPUs do for a request, recorded once for its sizes, and replayed.

What the host gives a GPU piece by piece takes it some ten microseconds each, and in a step of a decoder that is more
than the GPUs take. A graph is given at once. It has all ranks' engines, what passes between them, and the copies of
inputs and outputs. It is ordered by events, as plain work is: no GPU in it spins until another one has come so far, and
so it can't hang.

The ranks' threads record it together (`splitc.runtime.replay.capture`): each gives its own stream what it would give it
anyway. The same sizes have to be run plainly before, so that engines know the shapes of their outputs, and all memory
and all kernels are there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from splitc.runtime.arrays import Zeros
from splitc.runtime.engines.gpu_array import GpuArray, Tape
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.errors import EngineError
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import NEVER, InFlightRequest, Served, closed_before
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.capture import Captured, capture

Array = npt.NDArray[Any]
# The ranks' states of a sequence, what tells them from others, and what tells requests apart.
States = Sequence[dict[str, Any]]
Places = tuple[int, ...]
Kind = tuple[Any, ...]
Key = tuple[Places, Kind]
# Recordings that a session keeps, and kinds of requests of which it remembers that they came.
MOST, REMEMBERED = 8, 64
# What requests have that belong to no sequence.
STATELESS: dict[str, Any] = {}
# Sequences that have ended whose states are kept for new ones.
FREE = 2
# Seconds between two looks whether the session is broken or closed.
LOOK = 0.1
# Requests of other kinds after which a recording is not in use any more.
IDLE = 64


@dataclass(eq=False)
class Recording:
    """The graph of requests of one kind, and the memory that it uses, by rank.

    It has the addresses of `states` in it, which are those of a sequence, by rank. The shortest replay took the GPUs so
    many `seconds`; the `last` request has that number.
    """

    captured: Captured
    tapes: Sequence[Tape]
    states: States
    seconds: float = 0.0
    last: int = 0


class Recordings:
    """What a session has recorded. One request at a time is replayed: `lock` is held meanwhile.

    `behind` is set when streams were given something plainly, with which they may not be done yet.
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
        """Give a new sequence the states of one that has ended, which graphs know, where they are of its sizes."""
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
        """Whether the states are of the sizes that the sequence begins with."""
        if set(request.initial) != {name for own in states for name in own}:
            return False
        pairs = [
            (worker.cut_initial(name, request), own[name])
            for worker, own in zip(self._workers, states, strict=True)
            for name in own
        ]
        return all(initial.shape == state.shape and str(initial.dtype) == state.dtype for initial, state in pairs)

    def takes(self, request: InFlightRequest) -> Key | None:
        """What to find the request's recording by, if it is to be replayed: one of its kind was run plainly before."""
        self._requests += 1
        if self.blocker is not None or request.initial:
            return None
        states = self._states_of(request.sequence)
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
                known = self._record(request)
            except Exception as error:  # of engines, CuPy, CUDA: the request may still run plainly
                self.blocker = str(error)
                return None
        known.last = self._requests
        self._kept[key] = known
        if len(self._kept) > MOST:
            self._drop(next(iter(self._kept))[0], 1)
        return known

    def _states_of(self, sequence: int | None) -> States:
        """The ranks' states of a sequence; None is that of requests which belong to none."""
        return [worker.sequences.get(sequence, STATELESS) for worker in self._workers]

    def _has_room(self) -> bool:
        """Whether another recording may be made. One that is in use does not go for it: more sequences than recordings
        would else make each step record.
        """
        oldest = next(iter(self._kept.values()), None)
        return len(self._kept) < MOST or oldest is None or self._requests - oldest.last > IDLE

    def forget(self, sequence: int) -> None:
        """A sequence has ended. Another one may have its states, where a graph knows them."""
        states = self._states_of(sequence)
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
        """The ranks' outputs, and when the GPUs were at work."""
        for worker, tape in zip(self._workers, recording.tapes, strict=True):
            for name, staged in tape.inputs.items():
                staged[...] = worker.cut_feed(name, request)
        if self.behind:
            for worker in self._workers:
                recording.captured.gpu.stream.wait_event(_record_event(worker.backend))
            self.behind = False
        seconds = recording.captured.play(recording.seconds)
        recording.seconds = min(seconds, recording.seconds or seconds)
        now = time.perf_counter()
        outputs = [{name: array.copy() for name, array in tape.outputs.items()} for tape in recording.tapes]
        return outputs, Span(Replay(), now - seconds, now)

    def _record(self, request: InFlightRequest) -> Recording:
        """Have all ranks' threads record the request. Raises the first one's error where it can't be captured."""
        tapes = [Tape() for _ in self._workers]
        made: list[Future[Captured | None]] = [Future() for _ in self._workers]
        for worker, tape, future in zip(self._workers, tapes, made, strict=True):
            worker.requests.put(partial(_take_part, worker, len(tapes), request, tape, future))
        done: set[Future[Captured | None]] = set()
        while len(done) < len(made):
            self._check()
            done, _ = wait(made, LOOK, FIRST_EXCEPTION)
            for future in done:
                future.result()
        captured = made[0].result()
        assert captured is not None
        return Recording(captured, tapes, self._states_of(request.sequence))


def _places(states: States) -> Places:
    """What tells the ranks' states from others, as long as they are there."""
    return tuple(map(id, states))


def _kind(request: InFlightRequest, states: States) -> Kind:
    """What requests have in common of which engines do the same; of a sequence also how long its states are."""
    sizes = [(name, array.shape) for name, array in request.feeds.items()]
    sizes += [(name, own[name].shape) for own in states for name in list(own)[:1]]
    return request.sequence is None, request.room, *sizes


def _record_event(gpu: Any) -> Any:
    with gpu.device:
        return gpu.record()


def _take_part(worker: Worker, ranks: int, request: InFlightRequest, tape: Tape, made: Future[Captured | None]) -> None:
    """Record what one rank does for the request, while all others do the same; `made` gets the first one's graph."""
    gpu, collectives = worker.backend, worker.collectives
    assert isinstance(gpu, GpuDevice)
    try:
        made.set_result(capture(gpu, collectives, range(ranks), tape, partial(_give, worker, gpu, request, tape)))
    except BaseException as error:  # the session waits for this
        made.set_exception(error)


def _give(worker: Worker, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> None:
    """Give the rank's stream all that it does for the request."""
    states = worker.sequences.get(request.sequence, {})

    def stage(name: str) -> GpuArray:
        value, tape.inputs[name] = gpu.stage(worker.cut_feed(name, request))
        return value

    values, _ = worker.execute(request, states, stage)
    if request.sequence is not None:
        for name, output in worker.resident.items():
            _replace(gpu, name, states[name], values[output])
    tape.outputs.update(gpu.copy_to_pinned({name: values[name] for name in worker.given(request)}))


def _replace(gpu: GpuDevice, name: str, state: GpuArray, value: GpuArray) -> None:
    """Write what a state becomes over what it was, where the next replay finds it."""
    if value.shape != state.shape or value.dtype != state.dtype:
        raise EngineError(f"the state '{name}' grows from {state.shape} to {value.shape}")
    if value.pointer != state.pointer:
        gpu.copy_over(state, value)
