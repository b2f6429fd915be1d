"""Outputs that stay on a GPU, as arrays of CuPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.engines.gpu_device import GpuDevice


def hand_over(gpu: GpuDevice, values: Mapping[str, GpuArray]) -> Callable[[], dict[str, Any]]:
    """Begin to copy arrays to CuPy's own. Returns a function that waits, on any thread, and gives these by name.

    Their memory is that of the default stream, as of arrays that a caller makes. The memory of the rank's stream would
    be used again as soon as the caller drops them, while work that the caller has begun may still read them.
    """
    if not values:
        return dict
    default = gpu.cuda.Stream.null
    with gpu.device:
        with default:
            made = {name: gpu.cupy.empty(value.shape, value.dtype) for name, value in values.items()}
            free = gpu.cuda.Event(disable_timing=True)
            free.record(default)
        gpu.stream.wait_event(free)
        for name, value in values.items():
            gpu.copy_over(GpuArray(made[name].data.ptr, value.shape, value.dtype, made[name]), value)
        gpu.keep(*made.values())  # even if a wait fails, the stream may still write to them
        done = gpu.record()

    def wait() -> dict[str, Any]:
        gpu.wait(done)
        return made

    return wait
