"""What several ranks give their GPUs, captured as one CUDA graph.

A capture begins on the first rank's stream, spreads to each stream that waits for it, and comes back. The ranks'
threads agree on each step: none goes on when another one has failed, and when it is over all streams are themselves
again.
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
    """A graph, which the GPU launches, and events before and after it."""

    gpu: GpuDevice
    graph: Any
    begin: Any
    end: Any

    def play(self, expected: float = 0.0) -> float:
        """Run the graph and wait for it, as long as is `expected` at first. Returns the seconds that it took the GPUs.

        To be called by one thread at a time, which may be any.
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
    """Capture what `give` gives the rank's stream, while all others do the same; the first one gets the graph.

    `tape` gets the memory on the host that the graph copies to and from. Raises on all ranks what one of them failed
    with.
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
    """What all ranks handed in. Raises what one of them failed with."""
    if isinstance(met, Failure):
        raise met.error
    return met


def _begin(gpu: GpuDevice) -> Any:
    # Engines may take memory while they are captured, which CUDA allows in this mode only.
    gpu.stream.begin_capture(gpu.cuda.runtime.streamCaptureModeRelaxed)
    return gpu.record()


def _give(gpu: GpuDevice, tape: Tape, give: Callable[[], None], start: Any) -> Any:
    """Returns the event of the end of what the rank's stream was given."""
    gpu.stream.wait_event(start)
    gpu.tape = tape
    try:
        give()
        return gpu.record()
    finally:
        gpu.tape = None


def _end(gpu: GpuDevice, ends: Any) -> Any:
    """The graph. To be called whatever came of the capture."""
    if not isinstance(ends, Failure):
        for end in ends:
            gpu.stream.wait_event(end)
    return gpu.stream.end_capture()
