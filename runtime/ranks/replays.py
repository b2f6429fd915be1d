"""A rank's CUDA graphs: each rank records and replays its part of a request, with its collectives inside.

Eager work takes the host about ten microseconds per launch. In a step of a decoder that is more than the GPU takes. A
graph is one launch. The same shapes must have run eagerly before, so that engines know their output shapes, all memory
is allocated and all kernels are loaded.

All ranks make the same decisions without communication: these depend only on the requests, which all ranks get whole
and in the same order, not on a rank's own feeds or states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import EngineError
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.gpu.array import GpuArray, Tape, Use
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.ranks.computation import Computation
from splitc.runtime.ranks.kept_recordings import REMEMBERED, Home, KeptRecordings, Kind, home_of, kind_of
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.recording import Played, Recording, capture
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.threads.failures import Failure, attempt, first_failure

# The most that a replay may differ from an eager run, relative to the largest value: kernels may sum in any order, and
# libraries may choose others for a graph. Five times what is allowed in half precision (tools/compare.py): a replay
# that reads wrong memory differs by more.
CLOSE = 2e-2
# The states of requests that belong to no sequence, and where these are.
STATELESS: dict[str, Any] = {}
STATELESS_HOME = Home(-1, ())


def not_replayed(reason: str) -> str:
    """The message for the user when requests run eagerly."""
    return f"requests are not replayed as CUDA graphs: {reason}"


class RankReplays:
    """The recordings of one rank, which computes requests by `computation`, on a GPU.

    Requests with an optional input of the model are never replayed. `everyone` are all ranks of the session, if there
    are several. After an attempt to record, they agree: all replay the request, or none.
    """

    def __init__(self, manifest: Manifest, computation: Computation, everyone: Sequence[int]) -> None:
        assert isinstance(computation.backend, GpuDevice), "others record nothing"
        self._optional = frozenset(tensor.name for tensor in manifest.optional)
        self._computation, self._gpu = computation, computation.backend
        self._everyone = everyone
        self._refused: dict[Kind, str] = {}
        self._kept = KeptRecordings(same_feeds=any(file.convolves for file in manifest.engines))
        # By the number of a sequence.
        self._homes: dict[int | None, Home] = {}

    @property
    def notes(self) -> list[str]:
        """Why requests are not replayed, for the user."""
        return list(map(not_replayed, dict.fromkeys(self._refused.values())))

    def play(self, request: InFlightRequest, drain: Callable[[], None]) -> Played | None:
        """Replay the request. Returns its outputs and the GPU's working time; None if it must run eagerly.

        `drain` waits for all earlier requests.
        """
        self._kept.requests += 1
        begins = bool(request.initial)
        if begins:
            self._begin(request)
        if request.initial or not self._optional.isdisjoint(request.feeds):
            return None
        home = self._home(request)
        kind = kind_of(request, home)
        recording = self._kept.pop(home, kind)
        if recording is None and (not self._kept.is_worth(kind, begins) or kind in self._refused):
            return None
        drain()  # so that requests end in order
        if recording is None:
            return self._record(request, home, kind)
        self._kept.keep(home, kind, recording)
        return recording.launch(self._computation, self._gpu, request)

    def _record(self, request: InFlightRequest, home: Home, kind: Kind) -> Played | None:
        """Record the rank's work for the request, and replay it. The outputs must equal those of an eager run.

        Returns None if any rank fails, can't capture the work, or gets other outputs: this request must then run
        eagerly. If the capture or the replay was the cause, requests of this kind are not recorded again.
        """
        computation = self._computation
        states = computation.sequences.get(request.sequence, STATELESS)
        self._kept.make_room(kind)
        try:
            for self._gpu.use in (Use.LAST, Use.CAPTURED):
                eager = attempt(partial(computation.run_aside, request, states))
                if self._why_not(eager):
                    return None
            recording = attempt(partial(self._capture, request, states))
        finally:
            self._gpu.use = Use.USUAL
        held = attempt(partial(computation.hold_states, request, states))
        if why := self._why_not(recording, held):  # of an engine, CuPy or CUDA
            self._refuse(kind, why)
            return None
        played = attempt(partial(self._replay_first, recording, request, eager))
        if why := self._why_not(played):
            self._refuse(kind, why)
            for name, before in held.items():
                self._gpu.copy_over(states[name], before)
            return None
        self._kept.keep(home, kind, recording)
        return played  # type: ignore[no-any-return]

    def _refuse(self, kind: Kind, why: str) -> None:
        self._refused[kind] = why
        if len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def _capture(self, request: InFlightRequest, states: dict[str, Any]) -> Recording:
        gpu, tape = self._gpu, Tape()
        self._computation.check_capturable(request)
        try:
            graph, outputs = capture(gpu, tape, partial(_give, self._computation, gpu, request, tape))
        finally:
            tape.kept.clear()
        return Recording(graph, tape, outputs, states, gpu.cuda.Event(), gpu.cuda.Event())

    def _replay_first(self, recording: Recording, request: InFlightRequest, eager: Mapping[str, Any]) -> Played:
        """Replay a new recording. Raises EngineError if its outputs differ from the eager run's."""
        self._gpu.recorded = True
        recording.graph.upload(self._gpu.stream)
        outputs, span = recording.launch(self._computation, self._gpu, request)
        if difference := find_difference(eager, outputs):
            raise EngineError(difference)
        return outputs, replace(span, step=Replay(captured=True))

    def _why_not(self, *done: Any) -> str:
        """The error of the first rank with a Failure among its results; empty if there is none.

        All must decide alike, since they wait for each other.
        """
        failure = first_failure(done)
        why = "" if failure is None else str(failure.error) or type(failure.error).__name__
        answers = self._computation.collectives.all_gather(self._everyone, why) if self._everyone else [why]
        if isinstance(answers, Failure):
            raise answers.error
        return next(filter(None, answers), "")

    def _begin(self, request: InFlightRequest) -> None:
        """Choose the home of a new sequence: that of an ended one if its states fit, to reuse its recordings."""
        new = home_of(request)
        spare = self._kept.take_spare(new)
        if spare is None:
            self._homes[request.sequence] = new
            return
        self._homes[request.sequence], states = spare
        self._gpu.clear(states.values())
        self._computation.sequences[request.sequence] = states
        request.initial = {}

    def _home(self, request: InFlightRequest) -> Home:
        """The home of the request's states. If these have grown, recordings for the old ones are dropped."""
        home = self._homes.get(request.sequence, STATELESS_HOME)
        if home.growth != request.growth:
            self._kept.drop(home)
            home = self._homes[request.sequence] = replace(home, growth=request.growth)
        return home

    def forget(self, sequence: int, reusable: bool) -> None:
        """End a sequence. Its `reusable` states are kept for another one if there are recordings for them.

        Or drop the recordings with the sum of adapters of this number, which is about to be freed.
        """
        self._kept.drop_adapters(sequence)
        if (home := self._homes.pop(sequence, None)) is None:
            return
        if reusable and home.is_zeros:
            self._kept.spare(home, self._computation.sequences[sequence])
        else:
            self._kept.drop(home)

    def clear(self) -> None:
        """Drop all recordings. NCCL's communicators can't be released before the recordings that use them."""
        self._kept.clear()


def find_difference(ran: Mapping[str, Any], played: Mapping[str, Any]) -> str:
    """The difference between the outputs of a replay and of an eager run, in words; empty if they agree."""
    for name in ran:
        eager, replayed = (_on_host(outputs[name]) for outputs in (ran, played))
        if eager.shape != replayed.shape:
            return f"the output '{name}' of the first replay has another shape than that of an eager run"
        one, other = eager.astype(np.float64), replayed.astype(np.float64)
        largest = np.abs(one[np.isfinite(one)]).max(initial=0.0)
        if not np.allclose(one, other, rtol=0.0, atol=CLOSE * largest, equal_nan=True):
            return f"the output '{name}' of the first replay differs from that of an eager run"
    return ""


def _on_host(array: Any) -> Array:
    """An array of CuPy or numpy as an array of numpy."""
    return array.get() if hasattr(array, "get") else array  # type: ignore[no-any-return]


def _give(computation: Computation, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> dict[str, GpuArray]:
    """Put the rank's work for the request on its stream. Returns its outputs, which stay on the GPU."""
    states = computation.sequences.get(request.sequence, {})

    def stage(name: str) -> GpuArray:
        feed = computation.feed_of(name, request)
        if isinstance(feed, GpuFeed):  # it is copied before each replay
            value = tape.inputs[name] = gpu.empty(feed.shape, str(feed.dtype))
        else:
            value, tape.inputs[name] = gpu.stage(feed)
        return value

    values, _ = computation.execute(request, states, stage)
    if request.sequence is not None:
        for name, output in computation.resident.items():
            _replace(gpu, name, states[name], values[output])
    return {name: values[name] for name in computation.given(request)}


def _replace(gpu: GpuDevice, name: str, state: GpuArray, value: GpuArray) -> None:
    """Copy a state's new value over the old one, where the next replay reads it."""
    if value.shape != state.shape or value.dtype != state.dtype:
        raise EngineError(f"the state '{name}' grows from {state.shape} to {value.shape}")
    if value.pointer != state.pointer:
        gpu.copy_over(state, value)
