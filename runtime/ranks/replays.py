"""A rank's CUDA graphs: each rank records and replays its part of a request, with its collectives inside.

Eager work takes the host about ten microseconds per launch, which in a step of a decoder is more than the GPU takes. A
graph is launched at once. The same shapes must have run eagerly before, so that engines know their output shapes, and
all memory is allocated and all kernels are loaded.

The ranks decide alike, without a word: what they go by are the requests, which all of them get whole and in the same
order, whatever a rank itself is fed and whichever states it has.
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
from splitc.runtime.gpu.array import GpuArray, Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.ranks.capture import capture
from splitc.runtime.ranks.computation import Computation
from splitc.runtime.ranks.kept_recordings import Home, KeptRecordings, Kind, home_of, kind_of
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.recording import Played, Recording
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.threads.failures import Failure, attempt

# How far off a replay may be of an eager run, relative to the largest value: the same kernels run, but sums of some
# come in any order, and libraries may choose others for a graph.
CLOSE = 2e-2
# The states of requests that belong to no sequence, and where these are.
STATELESS: dict[str, Any] = {}
STATELESS_HOME = Home(-1, ())


def not_replayed(reason: str) -> str:
    """The message for the user where requests run eagerly."""
    return f"requests are not replayed as CUDA graphs: {reason}"


class RankReplays:
    """The recordings of one rank. Requests with any optional input of the model are never replayed.

    `everyone` are all ranks of the session, if there are several. They agree on whether a request could be recorded:
    all replay it, or none.
    """

    def __init__(self, manifest: Manifest, everyone: Sequence[int] = ()) -> None:
        self._optional = frozenset(tensor.name for tensor in manifest.optional)
        self._everyone = everyone
        self._refused: dict[Kind, str] = {}
        self._kept = KeptRecordings()
        # By the number of a sequence.
        self._homes: dict[int | None, Home] = {}

    @property
    def is_joint(self) -> bool:
        """Whether other ranks go the same way, and may wait for this one."""
        return bool(self._everyone)

    @property
    def notes(self) -> list[str]:
        """Why requests are not replayed, for the user."""
        return list(map(not_replayed, dict.fromkeys(self._refused.values())))

    def play(
        self, computation: Computation, request: InFlightRequest, drain: Callable[[], None]
    ) -> tuple[dict[str, Array], Span] | None:
        """Replay the request: its outputs, and when the GPU worked. None if it has to run eagerly.

        `drain` waits for all earlier requests.
        """
        gpu = computation.backend
        assert isinstance(gpu, GpuDevice)
        self._kept.requests += 1
        if request.initial:
            self._begin(computation, gpu, request)
        if request.initial or not self._optional.isdisjoint(request.feeds):
            return None
        home = self._home(request)
        kind = kind_of(request, home)
        recording = self._kept.pop(home, kind)
        if recording is None and (not self._kept.is_worth(kind) or kind in self._refused):
            return None
        drain()  # so that requests end in order
        if recording is not None:
            self._kept.keep(home, kind, recording)
            return recording.launch(computation, gpu, request)
        states = computation.sequences.get(request.sequence, STATELESS)
        first = self._record(computation, gpu, request, kind, states)
        if first is None:
            return None
        self._kept.keep(home, kind, first[0])
        return first[1]

    def _record(
        self,
        computation: Computation,
        gpu: GpuDevice,
        request: InFlightRequest,
        kind: Kind,
        states: dict[str, Any],
    ) -> tuple[Recording, Played] | None:
        """Record the rank's work for the request, and replay it: this must give what an eager run of it gives.

        None if it can't be captured, or gives something else. Then no such request is ever recorded again, and this one
        has to run eagerly. It has to as well if it fails, on whichever rank.
        """
        ran = attempt(partial(computation.run_aside, request, states))
        if self._agree(computation, "it failed" if isinstance(ran, Failure) else ""):
            return None
        tape = Tape()
        made = attempt(partial(capture, gpu, tape, partial(_give, computation, gpu, request, tape)))
        tape.kept.clear()
        held = attempt(partial(computation.hold_states, request, states))
        failed = [str(each.error) for each in (made, held) if isinstance(each, Failure)]
        if why := self._agree(computation, failed[0] if failed else ""):  # of an engine, CuPy or CUDA
            self._refused[kind] = why
            return None
        assert not isinstance(ran, Failure) and not isinstance(made, Failure) and not isinstance(held, Failure)
        gpu.recorded = True
        graph, outputs = made
        graph.upload(gpu.stream)
        recording = Recording(graph, tape, outputs, states, gpu.cuda.Event(), gpu.cuda.Event())
        played = attempt(partial(recording.launch, computation, gpu, request))
        wrong = str(played.error) if isinstance(played, Failure) else find_difference(ran, played[0])
        if why := self._agree(computation, wrong):
            self._refused[kind] = why
            for name, before in held.items():
                gpu.copy_over(states[name], before)
            return None
        assert not isinstance(played, Failure)
        return recording, played

    def _agree(self, computation: Computation, why: str) -> str:
        """Why any of the ranks can't go on; nothing if all can. All must go the same way: they wait for each other."""
        told = computation.collectives.all_gather(self._everyone, why) if self._everyone else [why]
        if isinstance(told, Failure):
            raise told.error
        return next(filter(None, told), "")

    def _begin(self, computation: Computation, gpu: GpuDevice, request: InFlightRequest) -> None:
        """Note where a new sequence has its states: in those of an ended one, if they fit, which recordings know."""
        new = home_of(request)
        found = self._kept.take_spare(new)
        if found is None:
            self._homes[request.sequence] = new
            return
        self._homes[request.sequence], states = found
        gpu.clear(states.values())
        computation.sequences[request.sequence] = states
        request.initial = {}

    def _home(self, request: InFlightRequest) -> Home:
        """Where the request has its states. Recordings for states that have grown since are dropped."""
        home = self._homes.get(request.sequence, STATELESS_HOME)
        if home.growth != request.growth:
            self._kept.drop(home)
            home = self._homes[request.sequence] = replace(home, growth=request.growth)
        return home

    def forget(self, computation: Computation, sequence: int, reusable: bool) -> None:
        """The sequence has ended. If there are recordings for its `reusable` states, these are for another one."""
        if (home := self._homes.pop(sequence, None)) is None:
            return
        if reusable and home.is_zeros:
            self._kept.spare(home, computation.sequences[sequence])
        else:
            self._kept.drop(home)

    def clear(self) -> None:
        """Drop all recordings. NCCL's communicators can't be released before those with their work."""
        self._kept.clear()


def find_difference(ran: Mapping[str, Any], played: Mapping[str, Any]) -> str:
    """What is wrong with a replay's outputs, beside those of an eager run; nothing if they agree."""
    for name in ran:
        eager, replayed = (each[name].get() if hasattr(each[name], "get") else each[name] for each in (ran, played))
        if eager.shape != replayed.shape:
            return f"the first replay gave '{name}' in another shape than an eager run"
        one, other = eager.astype(np.float64), replayed.astype(np.float64)
        largest = np.abs(one[np.isfinite(one)]).max(initial=0.0)
        if not np.allclose(one, other, rtol=0.0, atol=CLOSE * largest, equal_nan=True):
            return f"the first replay gave another '{name}' than an eager run"
    return ""


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
