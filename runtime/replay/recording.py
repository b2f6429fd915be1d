"""One request as a CUDA graph: what all GPUs do for it, recorded once for its shapes, and replayed.

What the host gives a GPU piece by piece takes it some ten microseconds each, and in a step of a decoder that is more
than the GPUs take. A graph is given at once. It has all ranks' engines, what passes between them, and the copies of
inputs and outputs. It is ordered by events, as eager work is: no GPU in it spins until another one has come so far, and
so it can't hang.

The ranks' threads record it together (`splitc.runtime.replay.capture`): each gives its own stream what it would give it
anyway. The same shapes have to be run eagerly before, so that engines know the shapes of their outputs, and all memory
and all kernels are there.
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
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.capture import Captured, capture

# The states of a sequence, by rank.
States = Sequence[dict[str, Any]]
# What requests have that belong to no sequence.
STATELESS: dict[str, Any] = {}
# Seconds between two looks whether the session is broken or closed.
LOOK = 0.1


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

    def launch(self, workers: Sequence[Worker], request: InFlightRequest) -> tuple[list[dict[str, Array]], Span]:
        """Replay the request. Returns the ranks' outputs, and when the GPUs were at work."""
        for worker, tape in zip(workers, self.tapes, strict=True):
            for name, staged in tape.inputs.items():
                staged[...] = worker.cut_feed(name, request)
        seconds = self.captured.play(self.seconds)
        self.seconds = min(seconds, self.seconds or seconds)
        now = time.perf_counter()
        outputs = [{name: array.copy() for name, array in tape.outputs.items()} for tape in self.tapes]
        return outputs, Span(Replay(), now - seconds, now)

    def wait_for(self, workers: Sequence[Worker]) -> None:
        """Let the graph wait for what the ranks' streams were given so far."""
        for worker in workers:
            self.captured.gpu.stream.wait_event(_record_event(worker.backend))


def states_of(workers: Sequence[Worker], sequence: int | None) -> States:
    """The ranks' states of a sequence; None is that of requests which belong to none."""
    return [worker.sequences.get(sequence, STATELESS) for worker in workers]


def record(workers: Sequence[Worker], request: InFlightRequest, check: Callable[[], None]) -> Recording:
    """Have all ranks' threads record the request. Raises the first one's error where it can't be captured.

    `check` raises when nobody may wait for the ranks any longer.
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
