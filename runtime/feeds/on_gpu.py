"""Feeds that are on a GPU: arrays of CuPy, PyTorch, Triton or others, by DLPack or by CUDA's interface of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.hardware.gpus import need_cupy

# DLPack's numbers for memory that only GPUs see, and for memory that the driver moves.
CUDA_MEMORY = (2, 13)


@dataclass(frozen=True, eq=False)
class GpuFeed:
    """A contiguous array of CuPy on the GPU `device` of this process, which is complete after the event `ready`."""

    array: Any
    device: int
    ready: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        known: np.dtype[Any] = self.array.dtype
        return known

    @property
    def pointer(self) -> int:
        """Its address on the GPU."""
        return int(self.array.data.ptr)

    def copy(self) -> GpuFeed:
        """A copy on the same GPU, which is complete."""
        cupy = need_cupy()
        with cupy.cuda.Device(self.device), _arrivals(self.device) as stream:
            copied = GpuFeed(self.array.copy(), self.device, _record(stream))
            copied.ready.synchronize()
        return copied

    def on_host(self) -> Array:
        """A copy in the host's memory."""
        with need_cupy().cuda.Device(self.device):
            self.ready.synchronize()
            copied: Array = self.array.get()
        return copied


# What a request is fed: an array on the host or on a GPU.
Feed = Array | GpuFeed


def on_host(feed: Feed) -> Array:
    """The feed on the host, which is a copy of one on a GPU."""
    return feed.on_host() if isinstance(feed, GpuFeed) else feed


def is_on_gpu(feed: object) -> bool:
    """Whether the object is an array in a GPU's memory."""
    if isinstance(feed, np.ndarray):
        return False
    if hasattr(feed, "__dlpack_device__"):
        return feed.__dlpack_device__()[0] in CUDA_MEMORY
    return hasattr(feed, "__cuda_array_interface__")


def read_gpu_feed(feed: Any) -> GpuFeed:
    """The array as a feed, without a copy if it is contiguous.

    To be called by the thread that made the array: its library knows by the thread's current stream what the array must
    wait for. Raises what the library raises.
    """
    cupy = need_cupy()
    by_dlpack = hasattr(feed, "__dlpack_device__")
    device = int(feed.__dlpack_device__()[1]) if by_dlpack else int(cupy.asarray(feed).device.id)
    stream = _arrivals(device)
    with cupy.cuda.Device(device):
        # What the caller has begun with CuPy: its arrays wait for the current stream, which is another one below.
        stream.wait_event(_record(cupy.cuda.get_current_stream()))
        with stream:
            array = cupy.asarray(cupy.from_dlpack(feed) if by_dlpack else feed, order="C")
            return GpuFeed(array, device, _record(stream))


def _record(stream: Any) -> Any:
    """An event that happens when the stream has done all its work so far."""
    event = need_cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


@cache
def _arrivals(device: int) -> Any:
    """The stream on which this process takes arrays: it waits for their makers, so that ranks' streams need not."""
    cupy = need_cupy()
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)
