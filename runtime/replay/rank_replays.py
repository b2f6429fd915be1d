"""A rank's own CUDA graphs: each rank records and replays its part of a request, with its collectives inside.

The ranks decide alike, without a word: what they go by are the requests, which all of them get in the same order.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.engines.gpu_array import GpuArray, Tape
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.recording import give

# What a recording is for: the shapes of a request, and the identity of its sequence's states.
Kind = tuple[Any, ...]
Key = tuple[int, Kind]
# The most recordings that a rank keeps, and the most kinds of requests that it remembers as seen.
MOST, REMEMBERED = 8, 64
# The most ended sequences whose states are kept for new ones.
MOST_SPARE = 2
# A recording is unused if this many requests came since its last replay.
IDLE = 64
# The states of requests that belong to no sequence.
STATELESS: dict[str, Any] = {}


@dataclass(eq=False)
class RankRecording:
    """The rank's graph for one kind of request, and its buffers.

    The graph has the addresses of `states` in it. `seconds` is the time of the shortest replay; `last` is the number of
    the last request that was replayed.
    """

    graph: Any
    tape: Tape
    outputs: dict[str, GpuArray]
    states: dict[str, Any]
    begin: Any
    end: Any
    seconds: float = 0.0
    last: int = 0

    def launch(self, worker: Worker, gpu: GpuDevice, request: InFlightRequest) -> tuple[dict[str, Array], Span]:
        """Replay the request and wait for its end."""
        for name, staged in self.tape.inputs.items():
            staged[...] = worker.cut_feed(name, request)
        self.begin.record(gpu.stream)
        self.graph.launch(gpu.stream)
        outputs = gpu.copy_to_pinned(self.outputs, worker.room)
        self.end.record(gpu.stream)
        gpu.wait(self.end, expected=self.seconds)
        seconds = float(gpu.cuda.get_elapsed_time(self.begin, self.end)) / 1e3
        self.seconds = min(seconds, self.seconds or seconds)
        now = time.perf_counter()
        return outputs, Span(Replay(), now - seconds, now)


class RankReplays:
    """The recordings of one rank. Requests with any of the inputs `optional` are never replayed.

    `everyone` are all ranks of the session, if they have steps between their engines. Such ranks agree on whether a
    request could be recorded: all replay it, or none.
    """

    def __init__(self, optional: Collection[str] = (), everyone: Sequence[int] = ()) -> None:
        self._optional = frozenset(optional)
        self._everyone = everyone
        self._requests = 0
        self._kept: OrderedDict[Key, RankRecording] = OrderedDict()
        self._seen: OrderedDict[Kind, None] = OrderedDict()
        self._refused: dict[Kind, str] = {}
        # States of ended sequences, for which there are recordings.
        self._spare: dict[int, dict[str, Any]] = {}

    @property
    def notes(self) -> list[str]:
        """Why requests are not replayed, for the user."""
        return [f"requests are not replayed as CUDA graphs: {why}" for why in dict.fromkeys(self._refused.values())]

    def play(self, worker: Worker, request: InFlightRequest) -> tuple[dict[str, Array], Span] | None:
        """See Replays."""
        gpu = worker.backend
        assert isinstance(gpu, GpuDevice)
        self._requests += 1
        if request.initial:
            self._adopt(worker, gpu, request)
        if request.initial or worker.capture_blocker is not None or not self._optional.isdisjoint(request.feeds):
            return None
        states = worker.sequences.get(request.sequence, STATELESS)
        kind = _kind(request, states)
        key = id(states), kind
        recording = self._kept.pop(key, None)
        if recording is None and self._is_worth(kind):
            recording = self._record(worker, gpu, request, kind, states)
        if recording is None:
            return None
        worker.drain()  # so that requests end in order
        recording.last = self._requests
        self._kept[key] = recording
        if len(self._kept) > MOST:
            self._drop(next(iter(self._kept))[0], 1)
        return recording.launch(worker, gpu, request)

    def _is_worth(self, kind: Kind) -> bool:
        """Whether to record a request of this kind: one was seen before, and there is room."""
        known = kind in self._seen
        self._seen[kind] = None
        self._seen.move_to_end(kind)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        if not known or kind in self._refused:
            return False
        # Recordings in use are not dropped for others. Else, with more sequences than recordings, each request would
        # make a new one.
        oldest = next(iter(self._kept.values()), None)
        return len(self._kept) < MOST or oldest is None or self._requests - oldest.last > IDLE

    def _record(
        self, worker: Worker, gpu: GpuDevice, request: InFlightRequest, kind: Kind, states: dict[str, Any]
    ) -> RankRecording | None:
        """Record the rank's work for the request. None if it can't be captured: then no such request ever is."""
        worker.drain()
        tape = Tape()
        made = attempt(partial(_capture, worker, gpu, request, tape))
        if self._everyone:
            agreed = worker.collectives.all_gather(self._everyone, made if isinstance(made, Failure) else None)
            made = agreed if isinstance(agreed, Failure) else made
        tape.kept.clear()
        if isinstance(made, Failure):  # of an engine, CuPy or CUDA: the request can still run eagerly
            self._refused[kind] = str(made.error)
            return None
        gpu.recorded = True
        graph, outputs = made
        graph.upload(gpu.stream)
        return RankRecording(graph, tape, outputs, states, gpu.cuda.Event(), gpu.cuda.Event())

    def _adopt(self, worker: Worker, gpu: GpuDevice, request: InFlightRequest) -> None:
        """Give a new sequence the states of an ended one, if the shapes fit, so that recordings can be reused."""
        if not all(isinstance(each, Zeros) for each in request.initial.values()):
            return
        for place, states in self._spare.items():
            if _fit(worker, request, states):
                del self._spare[place]
                for state in states.values():
                    gpu.clear(state)
                worker.sequences[request.sequence] = states
                request.initial = {}
                return

    def forget(self, worker: Worker, sequence: int) -> None:
        """See Replays. If there are recordings for the states, these are kept for another sequence."""
        states = worker.sequences.get(sequence, STATELESS)
        if any(place == id(states) for place, _ in self._kept):
            self._spare[id(states)] = states
        if len(self._spare) > MOST_SPARE:
            self._drop(next(iter(self._spare)), MOST)

    def _drop(self, place: int, count: int) -> None:
        """Drop up to `count` recordings with these states, the oldest first."""
        for key in [key for key in self._kept if key[0] == place][:count]:
            del self._kept[key]
        if not any(known == place for known, _ in self._kept):
            self._spare.pop(place, None)


def _capture(worker: Worker, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> tuple[Any, dict[str, GpuArray]]:
    """The graph of the rank's work for the request, and the outputs, which it leaves on the GPU."""
    gpu.prepare()
    # Engines may allocate memory while they are captured, which CUDA only allows in this mode.
    gpu.stream.begin_capture(gpu.cuda.runtime.streamCaptureModeRelaxed)
    gpu.tape = tape
    given = attempt(partial(give, worker, gpu, request, tape))
    gpu.tape = None
    graph = attempt(gpu.stream.end_capture)  # even if it failed: no stream is left capturing
    for each in (given, graph):
        if isinstance(each, Failure):
            raise each.error
    return graph, given


def _fit(worker: Worker, request: InFlightRequest, states: dict[str, Any]) -> bool:
    """Whether the states have the shapes and types of the sequence's initial states."""
    initial = {name: worker.cut_initial(name, request) for name in states if name in request.initial}
    return initial.keys() == worker.resident.keys() == states.keys() and all(
        (each.shape, str(each.dtype)) == (states[name].shape, states[name].dtype) for name, each in initial.items()
    )


def _kind(request: InFlightRequest, states: dict[str, GpuArray]) -> Kind:
    """A key that is equal for requests with the same work: their shapes, and the lengths of a sequence's states."""
    shapes = [(name, array.shape) for name, array in request.feeds.items()]
    shapes += [(name, states[name].shape) for name in list(states)[:1]]
    return request.sequence is None, request.room, *shapes
