"""A rank's CUDA graphs: each rank records and replays its part of a request, with its collectives inside.

Eager work takes the host about ten microseconds per launch, which in a step of a decoder is more than the GPU takes. A
graph is launched at once. The same shapes must have run eagerly before, so that engines know their output shapes, and
all memory is allocated and all kernels are loaded.

The ranks decide alike, without a word: what they go by are the requests, which all of them get in the same order. Ranks
that are fed nothing, as those that only multiply in row mode, can't tell requests apart, and are led (`led_replays`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.engines.gpu_array import GpuArray, Tape
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.errors import EngineError
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.gpu_feeds import GpuFeed
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker, not_replayed
from splitc.runtime.replay.capture import capture
from splitc.runtime.replay.kept import KeptRecordings, Kind, fit, kind_of
from splitc.runtime.replay.lead import Act, Lead
from splitc.runtime.replay.recording import STATELESS, Played, Recording

# How far off a replay may be of an eager run, relative to the largest value: the same kernels run, but sums of some
# come in any order, and libraries may choose others for a graph.
CLOSE = 2e-2


class RankReplays:
    """The recordings of one rank. Requests with any of the inputs `optional` are never replayed.

    `everyone` are all ranks of the session, if there are several. They agree on whether a request could be recorded:
    all replay it, or none. `lead` tells ranks without inputs what this one does. `sequences` says whether requests of
    sequences may be replayed: not if ranks can't agree on these.
    """

    def __init__(
        self,
        optional: Collection[str] = (),
        everyone: Sequence[int] = (),
        lead: Lead | None = None,
        sequences: bool = True,
    ) -> None:
        self._optional = frozenset(optional)
        self._sequences = sequences
        self._reasons: list[str] = []
        self._everyone = everyone
        self._lead = lead
        self._count = 0
        self._refused: dict[Kind, str] = {}
        self._kept = KeptRecordings()

    @property
    def notes(self) -> list[str]:
        """Why requests are not replayed, for the user."""
        return list(map(not_replayed, dict.fromkeys([*self._reasons, *self._refused.values()])))

    def play(self, worker: Worker, request: InFlightRequest) -> tuple[dict[str, Array], Span] | None:
        """See Replays."""
        gpu = worker.backend
        assert isinstance(gpu, GpuDevice)
        self._kept.requests += 1
        if request.initial and request.after is None:
            self._adopt(worker, gpu, request)
        runs_eagerly = bool(request.initial)
        if request.sequence is not None and not self._sequences:
            runs_eagerly, self._reasons = True, ["some ranks have states of a sequence, and others have none"]
        if runs_eagerly or worker.capture_blocker is not None or not self._optional.isdisjoint(request.feeds):
            self._tell(worker, Act.EAGER)
            return None
        states = worker.sequences.get(request.sequence, STATELESS)
        place, kind = id(states), kind_of(request, states)
        recording = self._kept.pop(place, kind)
        if recording is not None:
            self._tell(worker, Act.REPLAY, recording.number)
        elif self._kept.is_worth(kind) and kind not in self._refused:
            self._count += 1
            self._tell(worker, Act.RECORD, self._count)
            first = self._record(worker, gpu, request, kind, states, self._count)
            if first is None:
                return None
            self._kept.keep(place, kind, first[0])
            return first[1]
        else:
            self._tell(worker, Act.EAGER)
        if recording is None:
            return None
        worker.drain()  # so that requests end in order
        self._kept.keep(place, kind, recording)
        return recording.launch(worker, gpu, request)

    def _tell(self, worker: Worker, act: Act, number: int = 0) -> None:
        """Tell the ranks that this one leads what it does with a request, and which recordings it keeps."""
        if self._lead is not None and worker.capture_blocker is None:
            self._lead.tell(worker, act, number, [each.number for each in self._kept.all()])

    def _record(
        self,
        worker: Worker,
        gpu: GpuDevice,
        request: InFlightRequest,
        kind: Kind,
        states: dict[str, Any],
        number: int,
    ) -> tuple[Recording, Played] | None:
        """Record the rank's work for the request, and replay it: this must give what an eager run of it gives.

        None if it can't be captured, or gives something else. Then no such request is ever recorded again, and this one
        has to run eagerly. It has to as well if it fails, on whichever rank.
        """
        worker.drain()
        ran = attempt(partial(worker.run_aside, request, states))
        if self._agree(worker, "it failed" if isinstance(ran, Failure) else ""):
            return None
        tape = Tape()
        made = attempt(partial(capture, gpu, tape, partial(_give, worker, gpu, request, tape)))
        tape.kept.clear()
        held = attempt(partial(worker.hold_states, request, states))
        failed = [str(each.error) for each in (made, held) if isinstance(each, Failure)]
        if why := self._agree(worker, failed[0] if failed else ""):  # of an engine, CuPy or CUDA
            self._refused[kind] = why
            return None
        assert not isinstance(ran, Failure) and not isinstance(made, Failure) and not isinstance(held, Failure)
        gpu.recorded = True
        graph, outputs = made
        graph.upload(gpu.stream)
        recording = Recording(graph, tape, outputs, states, gpu.cuda.Event(), gpu.cuda.Event(), number=number)
        played = attempt(partial(recording.launch, worker, gpu, request))
        wrong = str(played.error) if isinstance(played, Failure) else find_difference(ran, played[0])
        if why := self._agree(worker, wrong):
            self._refused[kind] = why
            for name, before in held.items():
                gpu.copy_over(states[name], before)
            return None
        assert not isinstance(played, Failure)
        return recording, played

    def _agree(self, worker: Worker, why: str) -> str:
        """Why any of the ranks can't go on; nothing if all can. All must go the same way: they wait for each other."""
        told = worker.collectives.all_gather(self._everyone, why) if self._everyone else [why]
        if isinstance(told, Failure):
            raise told.error
        return next(filter(None, told), "")

    def _adopt(self, worker: Worker, gpu: GpuDevice, request: InFlightRequest) -> None:
        """Give a new sequence the states of an ended one, if the shapes fit, so that recordings can be reused."""
        if not all(isinstance(each, Zeros) for each in request.initial.values()):
            return
        if not request.initial.keys() >= worker.resident.keys():
            return
        states = self._kept.take_spare(partial(fit, worker, request))
        if states is None:
            return
        gpu.clear(states.values())
        worker.sequences[request.sequence] = states
        request.initial = {}

    def forget(self, worker: Worker, sequence: int) -> None:
        """See Replays. If there are recordings for the states, these are kept for another sequence."""
        states = worker.sequences.get(sequence, STATELESS)
        self._kept.forget(id(states), states)

    def clear(self) -> None:
        """See Replays."""
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


def _give(worker: Worker, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> dict[str, GpuArray]:
    """Put the rank's work for the request on its stream. Returns its outputs, which stay on the GPU."""
    states = worker.sequences.get(request.sequence, {})

    def stage(name: str) -> GpuArray:
        feed = worker.feed_of(name, request)
        if isinstance(feed, GpuFeed):  # it is copied before each replay
            value = tape.inputs[name] = gpu.empty(feed.shape, str(feed.dtype))
        else:
            value, tape.inputs[name] = gpu.stage(feed)
        return value

    values, _ = worker.execute(request, states, stage)
    if request.sequence is not None:
        for name, output in worker.resident.items():
            _replace(gpu, name, states[name], values[output])
    return {name: values[name] for name in worker.given(request)}


def _replace(gpu: GpuDevice, name: str, state: GpuArray, value: GpuArray) -> None:
    """Copy a state's new value over the old one, where the next replay reads it."""
    if value.shape != state.shape or value.dtype != state.dtype:
        raise EngineError(f"the state '{name}' grows from {state.shape} to {value.shape}")
    if value.pointer != state.pointer:
        gpu.copy_over(state, value)
