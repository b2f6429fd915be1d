"""One GPU as a rank uses it: a stream, memory, and copies on that stream. Nothing but a download waits for the GPU."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays import accumulate_arrays, number_type
from splitc.runtime.device_profiles import find_profile
from splitc.runtime.engines.gpu_array import GpuArray, Tape
from splitc.runtime.engines.kernels import combine, copy
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpus import need_cupy

# Seconds that a rank waits for its GPU before it says that something hangs.
PATIENCE = 120.0
# Seconds between two looks whether a GPU is done: to look all the time would keep the interpreter's lock from the other
# ranks' threads, which have work to give to their GPUs.
NAP = 1e-5
# The parts of a known time in which to sleep, and after which to look now and then only: a sleep takes some 60
# microseconds longer than it should, and on some machines several times that.
EARLY, LATE = 0.5, 2.0
# Seconds that are worth sleeping in.
WORTH = 5e-4
# Seconds that a rank waits for its GPU when it ends.
CLOSING = 5.0
# GPUs whose streams did not come to an end.
_STUCK: list[GpuDevice] = []
# cudaErrorNotReady.
NOT_READY = 600
# Smaller pieces of memory are taken as they are asked for.
LARGE = 1 << 20


class GpuDevice:
    """A rank's GPU. To be made anywhere, and then used by one thread, which calls `attach` first.

    `profile` is what is known of its kind. `notes` are what a user should know of it.
    While a request is recorded as a CUDA graph, `tape` is this rank's part of that; `recorded` says that one ever was.
    `interrupted` tells, while the thread waits, why it should not wait any longer.
    Raises PackageError where there is no such GPU.
    """

    asynchronous = True

    def __init__(self, index: int) -> None:
        self.tape: Tape | None = None
        self.recorded = False
        self.cupy = need_cupy()
        self.cuda = self.cupy.cuda
        self.index = index
        try:
            count = self.cuda.runtime.getDeviceCount()
        except self.cuda.runtime.CUDARuntimeError as error:
            raise PackageError(f"cuda{index} can't be used: {error}") from error
        if index >= count:
            raise PackageError(f"there is no cuda{index}: this machine has {count} GPUs (see 'splitc devices')")
        self.interrupted: Callable[[], BaseException | None] = lambda: None
        self.notes: list[str] = []
        properties = self.cuda.runtime.getDeviceProperties(index)
        capability = f"{properties['major']}.{properties['minor']}"
        self.profile = find_profile("cuda", properties["name"].decode(), capability)
        with self.device:
            self.stream = self.cuda.Stream(non_blocking=True)
        self._kept: deque[tuple[Any, tuple[Any, ...]]] = deque()
        # Memory of recordings: each uses it from its beginning to its end, one after the other.
        self._private = self.cuda.MemoryPool()

    @property
    def device(self) -> Any:
        """CuPy's device, by itself for each use: it remembers what to go back to, which is one thing in each thread."""
        return self.cuda.Device(self.index)

    def attach(self) -> None:
        """Make the calling thread work on this GPU and stream."""
        self.device.use()
        self.stream.use()

    def detach(self) -> None:
        """Wait until the stream is done, so that its memory may go; that of a stream that hangs stays for ever."""
        self.interrupted = lambda: None
        try:
            self.wait(self.record(), CLOSING)
        except EngineError:
            _STUCK.append(self)

    def empty(self, shape: tuple[int, ...], dtype: str) -> GpuArray:
        """Memory for an array, of CuPy's pool, which gives it to later work on this stream when it is free again."""
        size = math.prod(shape) * number_type(dtype).itemsize
        take = self.cuda.alloc if self.tape is None else self._private.malloc
        memory = take(_rounded(max(1, size)))  # engines want an address also where there is nothing
        return GpuArray(memory.ptr, shape, dtype, memory)

    def upload(self, array: npt.NDArray[Any]) -> GpuArray:
        """The array on the GPU, copied behind what the stream has to do."""
        return self.stage(array)[0]

    def zeros(self, shape: tuple[int, ...], dtype: str) -> GpuArray:
        """Zeros on the GPU, which nothing is copied for."""
        target = self.empty(shape, dtype)
        self.clear(target)
        return target

    def clear(self, array: GpuArray) -> None:
        """Make the array zeros."""
        self.cuda.runtime.memsetAsync(array.pointer, 0, array.nbytes, self.stream.ptr)

    def stage(self, array: npt.NDArray[Any]) -> tuple[GpuArray, npt.NDArray[Any]]:
        """As `upload`; beside it the pinned memory that the array is copied from, as an array."""
        target = self.empty(array.shape, str(array.dtype))
        if not array.nbytes:
            return target, array
        staged = self._pinned(array.shape, array.dtype)
        staged[...] = array
        self._copy(target.pointer, staged.ctypes.data, array.nbytes, self.cuda.runtime.memcpyHostToDevice)
        self.keep(staged)
        return target, staged

    def download(self, values: Mapping[str, GpuArray]) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays on the host; waits until the stream has made them all."""
        return self.fetch(values)()

    def fetch(self, values: Mapping[str, GpuArray]) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        """Begin to download; what is returned waits, on any thread, and gives the arrays."""
        if not values:
            return dict
        if self.tape is not None:
            raise EngineError(f"{', '.join(values)}: the host reads that while the request runs")
        copied, made = self.copy_to_pinned(values), self.record()

        def wait() -> dict[str, npt.NDArray[np.generic]]:
            self.wait(made)
            return {name: array.copy() for name, array in copied.items()}

        return wait

    def copy_to_pinned(self, values: Mapping[str, GpuArray]) -> dict[str, npt.NDArray[np.generic]]:
        """Pinned memory on the host that the arrays are copied to, behind what the stream has to do."""
        copied = {}
        for name, value in values.items():
            copied[name] = self._pinned(value.shape, number_type(value.dtype))
            self._copy(copied[name].ctypes.data, value.pointer, value.nbytes, self.cuda.runtime.memcpyDeviceToHost)
        self.keep(*copied.values())  # also when a wait ends in an error, and the copies are still to come
        return copied

    def copy_from(self, value: GpuArray, other: int) -> GpuArray:
        """An array of the GPU `other` on this one. Without peer access the driver takes it through the host."""
        target = self.empty(value.shape, value.dtype)
        if self.tape is not None:  # where all GPUs have access to each other, and CUDA does not capture copies of peers
            self._copy(target.pointer, value.pointer, value.nbytes, self.cuda.runtime.memcpyDefault)
        elif value.nbytes:
            self.cuda.runtime.memcpyPeerAsync(
                target.pointer, self.index, value.pointer, other, value.nbytes, self.stream.ptr
            )
        self.keep(value)
        return target

    def persist_state(self, value: GpuArray, before: GpuArray | None) -> GpuArray:
        """Recordings know states by their addresses, and write to memory of engines' own pools."""
        if value is before or not self.recorded:
            return value
        if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
            return self.copy_from(value, self.index)
        self.copy_over(before, value)
        return before

    def copy_over(self, target: GpuArray, value: GpuArray) -> None:
        """Write an array of this GPU over another one of the same size."""
        self._copy(target.pointer, value.pointer, value.nbytes, self.cuda.runtime.memcpyDeviceToDevice)
        self.keep(value)

    def combine(self, operation: str, parts: Sequence[GpuArray], whole: GpuArray) -> None:
        """Write the `sum` or `max` of arrays, of which others are on GPUs that this one has access to, to `whole`."""
        if size := math.prod(whole.shape):
            combine(operation, parts, whole, size)

    def cast(self, value: GpuArray, dtype: str) -> GpuArray:
        """The array in another number type: int64 as int32 on the GPU, all else by way of the host."""
        if (value.dtype, dtype) != ("int64", "int32"):
            return self.upload(self.download({"": value})[""].astype(number_type(dtype)))
        target = self.empty(value.shape, dtype)
        if count := math.prod(value.shape):
            # The lower half of each number, as a copy of rows: a kernel would want a compiler on every machine.
            kind = self.cuda.runtime.memcpyDeviceToDevice
            self.cuda.runtime.memcpy2DAsync(target.pointer, 4, value.pointer, 8, 4, count, kind, self.stream.ptr)
        return target

    def reserve(self, size: int) -> None:
        """Take memory for the pool in one piece, which it then divides.

        Pieces that it takes one by one never become one again: a cache that grows a little with each step would find
        none of those that were freed large enough.
        """
        self.cuda.alloc(max(1, size))

    def prepare(self) -> None:
        """Load what a recording copies with, which can't be done while it is captured, and wait for the stream."""
        here = self.empty((1,), "uint8")
        copy(here.pointer, here.pointer, 1)
        self.wait_all()

    def wait_all(self) -> None:
        """Wait until the stream has done all that it was given."""
        self.wait(self.record())

    def used_bytes(self) -> int:
        """The bytes of this GPU's memory that are in use, by anyone."""
        with self.device:
            free, total = self.cuda.runtime.memGetInfo()
        return int(total - free)

    def record(self) -> Any:
        """An event that happens when the stream has done all that it was given so far."""
        event = self.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def keep(self, *objects: Any) -> None:
        """Hold on to objects until the stream has come so far: it may not have read their memory yet."""
        if self.tape is not None:
            self.tape.kept.extend(objects)
            return
        self._kept.append((self.record(), objects))
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()

    def wait(self, event: Any, patience: float | None = None, expected: float = 0.0) -> None:
        """Wait for an event. Raises what `interrupted` tells, and EngineError when it takes too long.

        When it is known how many seconds it takes, the thread looks all the time towards their end.
        """
        most = PATIENCE if patience is None else patience
        start = time.monotonic()
        if expected > WORTH:
            time.sleep(EARLY * expected)
        while (status := self.cuda.runtime.eventQuery(event.ptr)) != 0:
            if status != NOT_READY:  # an earlier kernel or copy failed, and all that follows it
                raise EngineError(f"cuda{self.index} failed with CUDA error {status}")
            if (error := self.interrupted()) is not None:
                raise error
            waited = time.monotonic() - start
            if waited > most:
                raise EngineError(f"cuda{self.index} did not come to an end within {most:.0f} s: it seems to hang")
            if waited > LATE * expected:
                time.sleep(NAP)

    def accumulate(self, operation: str, total: npt.NDArray[Any], part: npt.NDArray[Any]) -> None:
        """Of arrays on the host: what GPUs do not sum by themselves is summed there."""
        accumulate_arrays(operation, total, part)

    def _pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array in the host's memory that a GPU can copy to and from by itself."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        pinned = self.cuda.alloc_pinned_memory(max(1, size))
        return np.frombuffer(pinned, np.uint8, size).view(dtype).reshape(shape)

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        if 0 < size <= self.profile.kernel_copy_bytes and self.tape is not None:
            copy(target, source, size)
        elif size:
            self.cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)


def _rounded(size: int) -> int:
    """The size of the piece of memory to take: so that a cache that grows a little fits one that was freed."""
    if size < LARGE:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step
