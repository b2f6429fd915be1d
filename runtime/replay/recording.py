"""One request as a CUDA graph: the work of all GPUs, recorded once for its shapes, and replayed.

Eager work takes the host about ten microseconds per launch, which in a step of a decoder is more than the GPUs take. A
graph is launched at once. It has all ranks' engines, the copies between them, and the copies of inputs and outputs. It
is ordered by events, as eager work is. No GPU spins to wait for another one, so a graph can't hang.

The ranks' threads record it together (`splitc.runtime.replay.capture`): each puts the same work on its stream as it
does eagerly. The same shapes must have run eagerly before, so that engines know their output shapes, and all memory is
allocated and all kernels are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from splitc.runtime.arrays import Array
from splitc.runtime.engines.gpu_array import GpuArray, Tape
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu_feeds import GpuFeed
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.capture import Captured, capture

# The states of a sequence, by rank.
States = Sequence[dict[str, Any]]
# The states of requests that belong to no sequence.
STATELESS: dict[str, Any] = {}
# Seconds between two checks whether the session is broken or closed.
LOOK = 0.1


@dataclass(eq=False)
class Recording:
    """The graph of requests of one kind, and each rank's buffers.

    The graph contains the addresses of `states`, which are the states of one sequence, by rank. `seconds` is the GPUs'
    time of the shortest replay; `last` is the number of the last request that was replayed.
    """

    captured: Captured
    tapes: Sequence[Tape]
    states: States
    seconds: float = 0.0
    last: int = 0

    def launch(self, workers: Sequence[Worker], request: InFlightRequest) -> tuple[list[dict[str, Array]], Span]:
        """Replay the request. Returns the ranks' outputs, and when the GPUs were working."""
        for worker, tape in zip(workers, self.tapes, strict=True):
            for name, staged in tape.inputs.items():
                _stage(worker, name, staged, request)
        if any(isinstance(staged, GpuArray) for tape in self.tapes for staged in tape.inputs.values()):
            self.wait_for(workers)
        seconds = self.captured.play(self.seconds)
        self.seconds = min(seconds, self.seconds or seconds)
        now = time.perf_counter()
        outputs = [_outputs(*each, request) for each in zip(workers, self.tapes, strict=True)]
        return outputs, Span(Replay(), now - seconds, now)

    def wait_for(self, workers: Sequence[Worker]) -> None:
        """Make the graph wait for all work so far on the ranks' streams."""
        for worker in workers:
            self.captured.gpu.stream.wait_event(_record_event(worker.backend))


def _stage(worker: Worker, name: str, staged: Array | GpuArray, request: InFlightRequest) -> None:
    """Put a feed where the graph reads it."""
    feed = worker.feed_of(name, request)
    if isinstance(staged, GpuArray):
        gpu = worker.backend
        assert isinstance(gpu, GpuDevice) and isinstance(feed, GpuFeed), "kinds of requests differ in that"
        with gpu.device:
            gpu.take(feed, staged)
    else:
        staged[...] = feed


def _outputs(worker: Worker, tape: Tape, request: InFlightRequest) -> dict[str, Array]:
    """A rank's outputs, for the caller to keep: the next replay writes to what the graph wrote to."""
    if request.on_device:
        return worker.hand_over(tape.outputs)()
    return {name: array.copy() for name, array in tape.outputs.items()}


def states_of(workers: Sequence[Worker], sequence: int | None) -> States:
    """The ranks' states of a sequence; None for requests that belong to no sequence."""
    return [worker.sequences.get(sequence, STATELESS) for worker in workers]


def record(workers: Sequence[Worker], request: InFlightRequest, check: Callable[[], None]) -> Recording:
    """Have all ranks' threads record the request. Raises the first error if it can't be captured.

    `check` raises if the session is broken or closed, which ends the wait for the ranks.
    """
    tapes = [Tape() for _ in workers]
    made: list[Future[Captured | None]] = [Future() for _ in workers]
    for worker, tape, future in zip(workers, tapes, made, strict=True):
        worker.requests.put(partial(_take_part, worker, len(tapes), request, tape, future))
    done: set[Future[Captured | None]] = set()
    while len(done) < len(made):
        check()
        done, _ = wait(made, LOOK, FIRST_EXCEPTION)
        for future in done:
            future.result()
    captured = made[0].result()
    assert captured is not None
    return Recording(captured, tapes, states_of(workers, request.sequence))


def _record_event(gpu: Any) -> Any:
    with gpu.device:
        return gpu.record()


def _take_part(worker: Worker, ranks: int, request: InFlightRequest, tape: Tape, made: Future[Captured | None]) -> None:
    """Record one rank's work for the request, while all others do the same. `made` gets the graph on the first rank."""
    gpu, collectives = worker.backend, worker.collectives
    assert isinstance(gpu, GpuDevice)
    try:
        made.set_result(capture(gpu, collectives, range(ranks), tape, partial(_give_all, worker, gpu, request, tape)))
    except BaseException as error:  # the session waits for this
        made.set_exception(error)


def _give_all(worker: Worker, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> None:
    """Put the rank's work for the request on its stream, and the copies of outputs that go to the host."""
    given = give(worker, gpu, request, tape)
    tape.outputs.update(given if request.on_device else gpu.copy_to_pinned(given))


def give(worker: Worker, gpu: GpuDevice, request: InFlightRequest, tape: Tape) -> dict[str, GpuArray]:
    """Put the rank's work for the request on its stream. Returns its outputs."""
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
