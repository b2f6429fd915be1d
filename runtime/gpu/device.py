"""One GPU as a rank uses it: a stream, memory, and copies on that stream. Only downloads wait for the GPU."""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Allocate, Zeros, bytes_of, number_type
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.gpu.array import GpuArray, Tape, Use
from splitc.runtime.gpu.kernels import copy
from splitc.runtime.gpu.pinned_memory import Pins
from splitc.runtime.gpu.weight_places import lay_out
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import need_cupy
from splitc.runtime.hardware.memory_use import MemoryUse
from splitc.runtime.hardware.profiles import PROFILES
from splitc.runtime.units import format_bytes

# Outputs from this size on are handed over in the pinned memory that the GPU wrote. A copy is new pages: those of the
# logits of 2,048 tokens, 125 MiB, took 20 ms. A choice: for callers that keep outputs, new pinned memory costs as much.
NOT_COPIED = 4 << 20
# Seconds that a rank waits for its GPU before it reports that it hangs. A choice: longer than any run of an engine.
PATIENCE = 120.0
# Seconds between two polls of a GPU. Polling without a pause would keep Python's global lock from the threads of other
# ranks, which launch work on their GPUs. A choice: the system's own delay is several times as long.
NAP = 1e-5
# If the expected time is known, a thread sleeps until the first share of it, then polls without a pause until the
# second, and with pauses afterwards. (A sleep takes about 60 microseconds too long, on some machines much more.) The
# shares are a choice: work that ends outside them is noticed a NAP or a sleep late.
EARLY, LATE = 0.5, 2.0
# The least expected seconds to sleep for: with the share EARLY, a sleep that ends 60 microseconds late still ends
# before the work does.
LEAST_SLEEP = 5e-4
# Seconds that a rank waits for its GPU when it ends. A choice, within the 10 s in which an error is promised.
CLOSING = 5.0
# GPUs whose streams did not finish, kept for ever, since their memory may still be in use.
_STUCK: list[GpuDevice] = []
# cudaErrorNotReady.
NOT_READY = 600
# Sizes of allocations from this many bytes on are rounded up, to one of 8 sizes for each power of two. A choice: caches
# are larger; smaller values are many, and to round them would waste up to an eighth.
LARGE = 1 << 20


class GpuDevice:
    """A rank's GPU. It may be created on any thread, and is then used by one thread, which calls `attach` first.

    - `name`: the user's name for it. `index`: CUDA's number of it in this process.
    - `profile`: describes its kind.
    - `notes`: messages for the user.
    - `stream`: where its work runs. It is non-blocking if the rank `replays` requests.
    - `tape`: this rank's buffers while a request is recorded as a CUDA graph.
    - `recorded`: whether any request was recorded.
    - `use`: what engines run now.

    Raises PackageError if there is no such GPU.
    """

    asynchronous = True

    def __init__(self, device: Device, replays: bool = True) -> None:
        self.name = str(device)
        self.index = index = device.number_here
        self.tape: Tape | None = None
        self.recorded = False
        self.use = Use.USUAL
        self.cupy = need_cupy()
        self.cuda = self.cupy.cuda
        self._pins = Pins(self.cupy, index)
        try:
            count = self.cuda.runtime.getDeviceCount()
        except self.cuda.runtime.CUDARuntimeError as error:
            raise PackageError(f"{self.name} can't be used: {error}") from error
        if index >= count:
            raise PackageError(f"there is no {self.name}: this machine has {count} GPUs (see 'splitc devices')")
        # Whether its rank was ended, which then waits for nothing any more.
        self._stopped = False
        self.notes: list[str] = []
        self.profile = PROFILES["cuda"]
        with self.device:
            # Some kernels of ONNX Runtime run on CUDA's default stream. It waits for other streams, and they for it,
            # unless they are non-blocking, as captured ones must be. A random graph gave wrong numbers on busy H200s.
            self.stream = self.cuda.Stream(non_blocking=replays)
        self._kept: deque[tuple[Any, tuple[Any, ...]]] = deque()
        # The memory of recordings, which have its addresses in them. A pool frees what is unused when memory is short.
        self._recorded_chunks: list[Any] = []
        self._private = self.cuda.MemoryPool(self._allocate_for_ever)

    @property
    def device(self) -> Any:
        """A new CuPy device for each use: as a context manager it stores the previous device, which is per thread."""
        return self.cuda.Device(self.index)

    def attach(self) -> None:
        """Make this GPU and stream current in the calling thread."""
        self.device.use()
        self.stream.use()

    def detach(self) -> None:
        """Wait until the stream has finished, so that its memory may be freed. If it hangs, its memory is kept."""
        self._stopped = False
        try:
            self.wait(self.record(), CLOSING)
        except EngineError:
            _STUCK.append(self)
            self._pins.keep()

    def empty(self, shape: tuple[int, ...], dtype: str) -> GpuArray:
        """Memory for an array from CuPy's pool. When it is freed, the pool reuses it for later work on this stream."""
        size = bytes_of(shape, dtype)
        take = self.cuda.alloc if self.tape is None else self._private.malloc
        memory = self._take(take, _rounded(max(1, size)))  # engines need an address even for empty arrays
        return GpuArray(memory.ptr, shape, dtype, memory)

    def allocate(self, size: int) -> Any:
        """Separate memory of this many bytes, which returns to the GPU when it is freed. Raises EngineError."""
        with self.device:
            return self._take(self.cuda.Memory, size)

    def _take(self, take: Callable[[int], Any], size: int) -> Any:
        try:
            return take(size)
        except MemoryError as error:  # CuPy's derives from it
            free = format_bytes(self.cuda.runtime.memGetInfo()[0])
            raise EngineError(f"{self.name} has {free} free, and {format_bytes(size)} more is needed") from error

    def _allocate_for_ever(self, size: int) -> Any:
        """Memory that lives as long as this object."""
        self._recorded_chunks.append(self.cuda.MemoryPointer(self.cuda.Memory(size), 0))
        return self._recorded_chunks[-1]

    def upload(self, array: npt.NDArray[Any]) -> GpuArray:
        """A copy of the array on the GPU, made on the stream."""
        return self.stage(array)[0]

    def zeros(self, wanted: Mapping[str, Zeros]) -> dict[str, GpuArray]:
        """Zeros by name, in one allocation: a decoder has a hundred states, and its start is waited for."""
        starts, size = lay_out(bytes_of(state.shape, state.dtype) for state in wanted.values())
        whole = self.empty((size,), "uint8")
        made = {
            name: GpuArray(whole.pointer + start, state.shape, state.dtype, whole.owner)
            for (name, state), start in zip(wanted.items(), starts, strict=True)
        }
        self.clear(made.values())
        return made

    def clear(self, states: Iterable[GpuArray]) -> None:
        """Set the states of a sequence to zeros, on the stream. States in one allocation are set at once."""
        pieces: dict[int, list[GpuArray]] = {}
        for state in states:
            pieces.setdefault(id(state.owner), []).append(state)
        for piece in pieces.values():
            start = min(state.pointer for state in piece)
            if size := max(state.pointer + state.nbytes for state in piece) - start:
                self.cuda.runtime.memsetAsync(start, 0, size, self.stream.ptr)

    def stage(self, array: npt.NDArray[Any]) -> tuple[GpuArray, npt.NDArray[Any]]:
        """As `upload`, and also returns the pinned source memory, as an array."""
        target = self.empty(array.shape, str(array.dtype))
        if not array.nbytes:
            return target, array
        staged = self.pinned(array.shape, array.dtype)
        staged[...] = array
        self._copy(target.pointer, staged.ctypes.data, array.nbytes, self.cuda.runtime.memcpyHostToDevice)
        self.keep(staged)
        return target, staged

    def download(self, values: Mapping[str, GpuArray]) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the arrays on the host. Waits until the stream has computed them."""
        return self.fetch(values)()

    def fetch(
        self, values: Mapping[str, GpuArray], allocate: Allocate | None = None
    ) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        """Begin to download. Returns a function that waits, on any thread, and returns the arrays."""
        if not values:
            return dict
        if self.tape is not None:
            raise EngineError(f"{', '.join(values)}: the host reads this while the request runs")
        copied, made = self.copy_to_pinned(values, allocate), self.record()

        def wait() -> dict[str, npt.NDArray[np.generic]]:
            self.wait(made)
            if allocate is not None:
                return copied
            # Pinned memory goes back to the pool when the caller drops the array.
            return {name: array if array.nbytes >= NOT_COPIED else array.copy() for name, array in copied.items()}

        return wait

    def copy_to_pinned(
        self, values: Mapping[str, GpuArray], allocate: Allocate | None
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Copy the arrays to pinned memory on the stream. Returns it by name: that of `allocate`, or new memory."""
        shapes = {name: (value.shape, number_type(value.dtype)) for name, value in values.items()}
        give = allocate or (lambda wanted: {name: self.pinned(*shape) for name, shape in wanted.items()})
        copied = give(shapes)
        for name, value in values.items():
            self._copy(copied[name].ctypes.data, value.pointer, value.nbytes, self.cuda.runtime.memcpyDeviceToHost)
        self.keep(*copied.values())  # even if a wait fails, the stream may still write to them
        return copied

    def take(self, feed: GpuFeed, target: GpuArray | None = None) -> GpuArray:
        """A copy of a feed on a GPU, once that is ready: in `target`, which has the same size, or in new memory."""
        made = target or self.empty(feed.shape, str(feed.dtype))
        self.stream.wait_event(feed.ready)
        if size := made.nbytes:
            self.cuda.runtime.memcpyPeerAsync(
                made.pointer, self.index, feed.pointer, feed.device, size, self.stream.ptr
            )
        self.keep(feed)
        return made

    def copy_of(self, value: GpuArray) -> GpuArray:
        """A copy of an array of this GPU, in new memory."""
        target = self.empty(value.shape, value.dtype)
        self.copy_over(target, value)
        return target

    def persist_state(self, value: GpuArray, before: GpuArray | None) -> GpuArray:
        """See Backend. Recordings contain the addresses of states, so these must not change."""
        if value is before or not self.recorded:
            return value
        if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
            return self.copy_of(value)
        self.copy_over(before, value)
        return before

    def copy_over(self, target: GpuArray, value: GpuArray) -> None:
        """Copy an array of this GPU over another one of the same size."""
        self._copy(target.pointer, value.pointer, value.nbytes, self.cuda.runtime.memcpyDeviceToDevice)
        self.keep(value)

    def copy_front(self, value: GpuArray, longer: GpuArray, axis: int) -> None:
        """See Backend. The axes before this one are treated as rows."""
        rows = math.prod(value.shape[:axis])
        if size := value.nbytes // max(1, rows):
            pitch, kind = longer.nbytes // rows, self.cuda.runtime.memcpyDeviceToDevice
            self.cuda.runtime.memcpy2DAsync(
                longer.pointer, pitch, value.pointer, size, size, rows, kind, self.stream.ptr
            )
        self.keep(value)

    def cast(self, value: GpuArray, dtype: str) -> GpuArray:
        """The array in another number type. int64 is cast to int32 on the GPU, other types on the host."""
        if (value.dtype, dtype) != ("int64", "int32"):
            return self.upload(self.download({"": value})[""].astype(number_type(dtype)))
        target = self.empty(value.shape, dtype)
        if count := math.prod(value.shape):
            # Copy the lower half of each number, as rows of 4 bytes. A kernel would need a compiler on every machine.
            kind = self.cuda.runtime.memcpyDeviceToDevice
            self.cuda.runtime.memcpy2DAsync(target.pointer, 4, value.pointer, 8, 4, count, kind, self.stream.ptr)
        return target

    def copy_functions(self) -> tuple[Any, Any]:
        """CUDA's cudaMemcpyAsync and cudaStreamSynchronize, for the C library. Raises PackageError without CUDA."""
        library = self._runtime_library()
        functions = library.cudaMemcpyAsync, library.cudaStreamSynchronize
        return ctypes.cast(functions[0], ctypes.c_void_p), ctypes.cast(functions[1], ctypes.c_void_p)

    def forget_error(self) -> None:
        """Clear what CUDA keeps of a capture that failed: ONNX Runtime's next kernel would take it for its own error.

        Raises PackageError without CUDA.
        """
        self._runtime_library().cudaGetLastError()

    def _runtime_library(self) -> ctypes.CDLL:
        major = self.cuda.runtime.runtimeGetVersion() // 1000
        try:
            return ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise PackageError(f"CUDA's runtime library can't be loaded: {error}") from error

    def reserve(self, size: int) -> None:
        """Allocate memory for the pool in one chunk, which it then divides.

        The pool never merges chunks that it allocates separately. A cache that grows with each step would find none of
        the freed chunks large enough.
        """
        self.cuda.alloc(max(1, size))

    def free_unused(self) -> None:
        """Return the pool's unused memory to the GPU."""
        with self.device:
            self.cupy.get_default_memory_pool().free_all_blocks()

    def prepare(self) -> None:
        """Load the copy kernel, which is impossible during a capture, and wait for the stream."""
        here = self.empty((1,), "uint8")
        copy(here.pointer, here.pointer, 1)
        self.wait_all()

    def wait_all(self) -> None:
        """Wait until the stream has finished all its work."""
        self.wait(self.record())

    def memory(self) -> MemoryUse:
        """This GPU's memory in use by any process. CuPy and the engines never return it, so this is also the peak."""
        with self.device:
            free, total = self.cuda.runtime.memGetInfo()
        return MemoryUse(int(total - free), int(total - free))

    def record(self) -> Any:
        """An event that completes when the stream has finished all work so far."""
        event = self.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def keep(self, *objects: Any) -> None:
        """Keep objects alive until the stream has finished all work so far, which may use their memory."""
        if self.tape is not None:
            self.tape.kept.extend(objects)
            return
        self._kept.append((self.record(), objects))
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()

    def wait(self, event: Any, patience: float | None = None, expected: float = 0.0) -> None:
        """Wait for an event, for at most `patience` seconds.

        With `expected` seconds, the thread sleeps first and polls without pauses around the expected end. Raises
        EngineError if the GPU fails, the wait takes too long, or it was stopped.
        """
        most = PATIENCE if patience is None else patience
        start = time.monotonic()
        if expected > LEAST_SLEEP:
            time.sleep(EARLY * expected)
        while (status := self.cuda.runtime.eventQuery(event.ptr)) != 0:
            if status != NOT_READY:  # an earlier kernel or copy failed, and so does everything after it
                raise EngineError(f"{self.name} failed with CUDA error {status}")
            if self._stopped:
                raise EngineError(f"{self.name} was stopped: its session was closed while a request ran")
            waited = time.monotonic() - start
            if waited > most:
                raise EngineError(f"{self.name} did not finish within {most:.0f} s: it seems to hang")
            if waited > LATE * expected:
                time.sleep(NAP)

    def stop(self) -> None:
        """End waits for the GPU."""
        self._stopped = True

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Pin memory of the host, until it is freed."""
        self._pins.add(memory)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array in pinned memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        pinned = self._pins.take(max(1, size), trims=self.tape is None)
        return np.frombuffer(pinned, np.uint8, size).view(dtype).reshape(shape)

    def pinned_alone(self, size: int) -> npt.NDArray[np.uint8]:
        """Separate pinned memory, which returns to the system when it is freed. Raises EngineError."""
        try:
            with self.device:
                memory = self.cuda.PinnedMemoryPointer(self.cuda.PinnedMemory(size), 0)
        except self.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(f"{format_bytes(size)} of the host can't be pinned for {self.name}: {error}") from error
        return np.frombuffer(memory, np.uint8, size)

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        if 0 < size <= self.profile.kernel_copy_bytes and self.tape is not None:
            copy(target, source, size)
        elif size:
            self.cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)


def _rounded(size: int) -> int:
    """The size to allocate. Large sizes are rounded up, so that a growing cache fits into a freed chunk."""
    if size < LARGE:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step
