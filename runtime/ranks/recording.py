"""A rank's CUDA graph for one kind of request: recorded once for its shapes, and replayed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from splitc.runtime.arrays.array import Array
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.gpu.array import GpuArray, Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.ranks.computation import Computation
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest

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
            outputs = computation.hand_over(self.outputs)()
        else:
            outputs = gpu.copy_to_pinned(self.outputs, computation.allocate)
        self.end.record(gpu.stream)
        gpu.wait(self.end, expected=self.seconds)
        seconds = float(gpu.cuda.get_elapsed_time(self.begin, self.end)) / 1e3
        self.seconds = min(seconds, self.seconds or seconds)
        now = time.perf_counter()
        return outputs, Span(Replay(), now - seconds, now)
