"""Capture the work of several ranks' GPUs as one CUDA graph.

A capture begins on the first rank's stream, spreads to the streams that wait for an event of it, and ends when the
first stream waits for events of the others. The ranks' threads agree on each step: none continues if another one has
failed, and at the end no stream is left capturing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from splitc.runtime.collectives import Collectives
from splitc.runtime.engines.gpu_array import Tape
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.failures import Failure, attempt


@dataclass(frozen=True)
class Captured:
    """A graph, the GPU that launches it, and events before and after it."""

    gpu: GpuDevice
    graph: Any
    begin: Any
    end: Any

    def play(self, expected: float = 0.0) -> float:
        """Launch the graph and wait for it. Returns the seconds that it took the GPUs; `expected` is a guess of these.

        May be called by any thread, but by one at a time.
        """
        gpu = self.gpu
        with gpu.device:
            self.begin.record(gpu.stream)
            self.graph.launch(gpu.stream)
            self.end.record(gpu.stream)
            gpu.wait(self.end, expected=expected)
            return float(gpu.cuda.get_elapsed_time(self.begin, self.end)) / 1e3


def capture(
    gpu: GpuDevice, collectives: Collectives, everyone: Sequence[int], tape: Tape, give: Callable[[], None]
) -> Captured | None:
    """Capture the work that `give` puts on the rank's stream, while all other ranks do the same.

    Returns the graph on the first rank, None on the others. `tape` gets the pinned memory that the graph copies from
    and to. If a rank fails, its error is raised on all ranks.
    """
    leads = collectives.rank == everyone[0]
    _agreed(collectives.all_gather(everyone, attempt(gpu.prepare)))
    start = _agreed(collectives.all_gather(everyone, attempt(partial(_begin, gpu)) if leads else None))[0]
    ends = collectives.all_gather(everyone, attempt(partial(_give, gpu, tape, give, start)))
    graph = collectives.all_gather(everyone, attempt(partial(_end, gpu, ends)) if leads else None)
    _agreed(ends)
    _agreed(graph)
    gpu.recorded = True
    tape.kept.clear()
    if not leads:
        return None
    graph[0].upload(gpu.stream)
    return Captured(gpu, graph[0], gpu.cuda.Event(), gpu.cuda.Event())


def _agreed(met: Any) -> Any:
    """The values of all ranks. Raises the error of a rank that has failed."""
    if isinstance(met, Failure):
        raise met.error
    return met


def _begin(gpu: GpuDevice) -> Any:
    # Engines may allocate memory while they are captured, which CUDA only allows in this mode.
    gpu.stream.begin_capture(gpu.cuda.runtime.streamCaptureModeRelaxed)
    return gpu.record()


def _give(gpu: GpuDevice, tape: Tape, give: Callable[[], None], start: Any) -> Any:
    """Put the rank's work on its stream, after the event `start`. Returns an event at its end."""
    gpu.stream.wait_event(start)
    gpu.tape = tape
    try:
        give()
        return gpu.record()
    finally:
        gpu.tape = None


def _end(gpu: GpuDevice, ends: Any) -> Any:
    """End the capture and return the graph. Must be called even if the capture has failed."""
    if not isinstance(ends, Failure):
        for end in ends:
            gpu.stream.wait_event(end)
    return gpu.stream.end_capture()
