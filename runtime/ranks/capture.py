"""Capture a GPU's work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from splitc.runtime.gpu.array import GpuArray, Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.graph_nodes import own_what_is_copied
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
