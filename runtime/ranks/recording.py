"""A rank's CUDA graph for one kind of request: captured once for its shapes, and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.gpu.array import GpuArray, Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.graph_nodes import own_what_is_copied
from splitc.runtime.ranks.computation import Computation, hand_over
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.threads.failures import attempt, first_failure

T = TypeVar("T")


def capture(gpu: GpuDevice, tape: Tape, give: Callable[[], T]) -> tuple[Any, T]:
    """The graph of the work that `give` puts on the GPU's stream, and the result of `give`.

    `tape` gets the pinned memory that the graph copies from. Raises any error of the capture: the work can still run
    eagerly. EngineError if the graph copies from or to host memory that may be freed before a replay.
    """
    gpu.prepare()
    # Engines may allocate memory while they are captured, which CUDA only allows in this mode.
    gpu.stream.begin_capture(gpu.cuda.runtime.streamCaptureModeRelaxed)
    gpu.tape = tape
    given = attempt(give)
    gpu.tape = None
    graph = attempt(gpu.stream.end_capture)  # even if it failed: no stream is left capturing
    if failure := first_failure((given, graph)):
        gpu.forget_error()
        raise failure.error
    staged = [buffer for buffer in tape.inputs.values() if not isinstance(buffer, GpuArray)]
    tape.owned = own_what_is_copied(graph, staged, lambda size: gpu.pinned((size,), np.uint8))
    return graph, given


# The outputs of a replay, and when the GPU worked.
Played = tuple[dict[str, Array], Span]


@dataclass(eq=False)
class Recording:
    """The rank's graph for one kind of request, and its buffers.

    - `states`: the graph contains their addresses.
    - `seconds`: the time of the shortest replay.
    - `last`: the number of the request that was replayed last.
    """

    graph: Any
    tape: Tape
    outputs: dict[str, GpuArray]
    states: dict[str, Any]
    begin: Any
    end: Any
    seconds: float = 0.0
    last: int = 0

    def launch(
        self, computation: Computation, gpu: GpuDevice, request: InFlightRequest
    ) -> tuple[dict[str, Array], Span]:
        """Replay the request and wait for its end."""
        for name, staged in self.tape.inputs.items():
            feed = computation.feed_of(name, request)
            if isinstance(staged, GpuArray):
                assert isinstance(feed, GpuFeed), "kinds of requests differ in that"
                gpu.take(feed, staged)
            else:
                staged[...] = feed
        self.begin.record(gpu.stream)
        self.graph.launch(gpu.stream)
        # Copies, since the next replay writes to the same memory.
        if request.on_device:
            outputs = hand_over(gpu, self.outputs)()
        else:
            outputs = gpu.copy_to_pinned(self.outputs, computation.allocate)
        self.end.record(gpu.stream)
        gpu.wait(self.end, expected=self.seconds)
        seconds = float(gpu.cuda.get_elapsed_time(self.begin, self.end)) / 1e3
        self.seconds = min(seconds, self.seconds or seconds)
        now = time.perf_counter()
        return outputs, Span(Replay(), now - seconds, now)
