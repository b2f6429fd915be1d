"""Outputs that stay on a GPU, as CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.units import format_bytes


def hand_over(gpu: GpuDevice, values: Mapping[str, GpuArray]) -> Callable[[], dict[str, Any]]:
    """Begin to copy arrays to new CuPy arrays. Returns a function that waits, on any thread, and returns these by name.

    Their memory belongs to the default stream, like that of the caller's own arrays. Memory of the rank's stream would
    be reused as soon as the caller drops the arrays, while work that the caller has launched may still read them.
    Raises EngineError if there is not enough memory.
    """
    if not values:
        return dict
    with gpu.device:
        own, default = gpu.cuda.get_current_stream(), gpu.cuda.Stream.null
        default.use()
        try:
            made = _allocate(gpu, values)
            free = gpu.cuda.Event(disable_timing=True)
            free.record(default)
        finally:  # as a context manager, the default stream would stay the current one, for captures too
            own.use()
        gpu.stream.wait_event(free)
        for name, value in values.items():
            gpu.copy_over(GpuArray(made[name].data.ptr, value.shape, value.dtype, made[name]), value)
        gpu.keep(*made.values())  # even if a wait fails, the stream may still write to them
        done = gpu.record()

    def wait() -> dict[str, Any]:
        gpu.wait(done)
        return made

    return wait


def _allocate(gpu: GpuDevice, values: Mapping[str, GpuArray]) -> dict[str, Any]:
    """CuPy's own arrays of these sizes, of the current stream."""
    try:
        return {name: gpu.cupy.empty(value.shape, value.dtype) for name, value in values.items()}
    except MemoryError as error:  # CuPy's derives from it
        size = format_bytes(sum(value.nbytes for value in values.values()))
        raise EngineError(
            f"{gpu.name} has no memory left for {size} of outputs that are to stay there: drop outputs of earlier "
            "requests, or run without on_device"
        ) from error
