"""Simulated GPUs: the part of CuPy that splitc uses, with host memory, a thread for each stream, and real asynchrony.

A stream runs its work in order, asynchronously; an event happens when its stream reaches it. Freed memory is
overwritten by the stream on which it was allocated, as if a pool reused it: memory that was freed too early shows in
the results.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from splitc.runtime.errors import EngineError

DEVICES = 4
# What uninitialized memory holds, and freed memory again.
POISON = 0xA5
# Seconds that a stream takes for each piece of work: the host runs ahead of the GPU.
SLOWNESS = 2e-5

current = threading.local()


class Stream:
    """A queue of work and its thread. While the stream is captured, work is added to a graph instead."""

    null: Stream

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.non_blocking = non_blocking
        self.graph: Graph | None = None
        self.done = 0
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        STREAMS[self.ptr] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            time.sleep(SLOWNESS)
            task()
            del task  # which may be all that a graph lives by
            self.done += 1

    def __enter__(self) -> Stream:
        current.before = [*getattr(current, "before", []), getattr(current, "stream", None)]
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        *current.before, before = current.before
        if self is not Stream.null:  # CuPy's default stream was seen to stay the current one
            current.stream = before

    def put(self, task: Callable[[], object]) -> None:
        if self.graph is not None:
            self.graph.work.setdefault(self.ptr, []).append(task)
        else:
            self._tasks.put(task)

    def use(self) -> None:
        current.stream = self

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def wait_event(self, event: Event) -> None:
        if event.graph is not None:
            self.graph = event.graph
        self.put(event.happened.wait)

    def begin_capture(self, mode: int) -> None:
        self.graph = Graph(self)

    def end_capture(self) -> Graph:
        graph = self.graph
        assert graph is not None
        for event in graph.events:
            event.graph = None
        captured = [stream for stream in STREAMS.values() if stream.graph is graph]
        for stream in captured:
            stream.graph = None
        if any(graph.unjoined(stream.ptr) for stream in captured):
            raise CUDARuntimeError("unjoined work")
        return graph


class Graph:
    """The captured work of several streams, which each stream runs asynchronously."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.work: dict[int, list[Callable[[], object]]] = {origin.ptr: []}
        self.events: list[Event] = []
        # The host addresses that it copies from or to.
        self.on_host: list[int] = []

    def unjoined(self, stream: int) -> bool:
        """Whether the origin does not wait for the stream's last event."""
        waited = [getattr(task, "__self__", None) for task in self.work[self.origin.ptr]]
        last = [event for event in self.events if event.stream == stream][-1:]
        return stream != self.origin.ptr and not any(event.happened in waited for event in last)

    def upload(self, stream: Stream) -> None:
        pass

    def launch(self, stream: Stream) -> None:
        stream.put(self._run)

    def _run(self) -> None:
        for event in self.events:
            event.happened.clear()
        threads = [threading.Thread(target=self._run_part, args=(part,)) for part in self.work.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.origin.done += max(map(len, self.work.values()))

    def _run_part(self, tasks: list[Callable[[], object]]) -> None:
        for task in tasks:
            time.sleep(SLOWNESS)
            task()


def own_what_is_copied(graph: Graph, known: Sequence[np.ndarray], pinned: Callable[[int], Any]) -> list[Any]:
    """Replaces the function of this name: refuses copies of host memory that is not pinned."""
    places = [range(each.ctypes.data, each.ctypes.data + each.nbytes) for each in known]
    if not all(any(address in place for place in places) for address in graph.on_host):
        raise EngineError("an engine copies between the GPU and memory of the host")
    return []


STREAMS: dict[int, Stream] = {}
# CuPy's default stream.
Stream.null = Stream()


def current_stream() -> Stream:
    """This thread's current stream, or the default one."""
    return getattr(current, "stream", None) or Stream.null


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.happened = threading.Event()
        self.ptr = id(self)
        self.graph: Graph | None = None
        self.stream = 0
        self.time = 0
        EVENTS[self.ptr] = self

    @property
    def done(self) -> bool:
        if self.graph is not None:
            raise CUDARuntimeError("an event of a graph that is being captured can't be asked")
        return self.happened.is_set()

    def record(self, stream: Stream) -> None:
        self.graph, self.stream = stream.graph, stream.ptr
        self.happened.clear()
        if self.graph is not None:
            self.graph.events.append(self)
        stream.put(self._happen)

    def synchronize(self) -> None:
        self.happened.wait()

    def _happen(self) -> None:
        self.time = STREAMS[self.stream].done
        self.happened.set()


EVENTS: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()


class Memory:
    """Bytes on a device. When freed, they are overwritten in the order of the stream on which they were allocated."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.ptr = self.bytes.ctypes.data
        self._stream = current_stream()

    def __del__(self) -> None:
        freed = self.bytes
        self._stream.put(lambda: freed.fill(POISON))


class MemoryPointer:
    """An address in memory, which it keeps alive."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self.memory, self.ptr = memory, memory.ptr + offset


def ndarray(shape: tuple[int, ...], dtype: str, place: MemoryPointer) -> Any:
    """A CuPy array as a numpy array that keeps its memory alive."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    interface = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (place.ptr, False)}
    return np.asarray(types.SimpleNamespace(__array_interface__=interface, memory=place)).view(dtype).reshape(shape)


class MemoryPool:
    """Memory that goes back to the pool when it is freed. Under pressure it would be freed, if nobody else has it."""

    def __init__(self, allocator: Callable[[int], Memory]) -> None:
        self.malloc = allocator


class PinnedPool:
    """Counts how often the pool's unused memory was returned."""

    def __init__(self) -> None:
        self.freed = 0

    def free_all_blocks(self) -> None:
        self.freed += 1


PINNED = PinnedPool()


class Pinned(np.ndarray):
    """Pinned memory, which is freed at once, even while copies to or from it run."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data

    def __del__(self) -> None:
        if self.base is None:
            self.fill(POISON)


class Device:
    def __init__(self, index: int) -> None:
        self.index = index

    def use(self) -> None:
        current.device = self.index

    def __enter__(self) -> None:
        self._before = getattr(current, "device", 0)
        self.use()

    def __exit__(self, *error: object) -> None:
        current.device = self._before


class CUDARuntimeError(RuntimeError):
    pass


def copy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
    graph = STREAMS[stream].graph
    if graph is not None and kind in (1, 2):
        graph.on_host.append(source if kind == 1 else target)
    STREAMS[stream].put(lambda: ctypes.memmove(target, source, size) and None)


def copy_rows_async(
    target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int, stream: int
) -> None:
    assert width <= min(pitch, source_pitch)
    for row in range(rows):
        copy_async(target + row * pitch, source + row * source_pitch, width, kind, stream)


def set_async(target: int, value: int, size: int, stream: int) -> None:
    STREAMS[stream].put(lambda: ctypes.memset(target, value, size) and None)


def copy_between(target: int, to: int, source: int, at: int, size: int, stream: int) -> None:
    copy_async(target, source, size, 0, stream)


def copy(target: int, source: int, size: int) -> None:
    """`splitc.runtime.gpu.kernels.copy` without a GPU."""
    copy_async(target, source, size, 0, current.stream.ptr)


# Registered host memory, its size by address; and the addresses that were freed before they were unregistered.
REGISTERED: dict[int, int] = {}
FREED: list[int] = []


def host_register(address: int, size: int, flags: int) -> None:
    if address in REGISTERED:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    REGISTERED[address] = size


def host_unregister(address: int) -> None:
    size = REGISTERED.pop(address)
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    if not any(int(begin, 16) <= address and address + size <= int(end, 16) for begin, end in maps):
        FREED.append(address)


class Cublas:
    """The products that cuBLAS was asked for, by its arguments, and its handles that are open."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.handles = 0

    def create(self) -> int:
        self.handles += 1
        return 1

    def destroy(self, handle: int) -> None:
        self.handles -= 1

    def gemmEx(self, *arguments: Any) -> None:
        assert self.handles
        self.asked.append(arguments)


def make(devices: int = DEVICES) -> types.SimpleNamespace:
    """The fake module `cupy`, with a number of devices."""
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda index: {"name": b"NVIDIA Imaginary", "major": 9, "minor": 0},
        deviceCanAccessPeer=lambda one, other: 1,
        memGetInfo=lambda: (60 << 30, 80 << 30),
        memcpyAsync=copy_async,
        memcpy2DAsync=copy_rows_async,
        memcpyPeerAsync=copy_between,
        memcpyDeviceToDevice=3,
        eventQuery=lambda pointer: 0 if EVENTS[pointer].done else 600,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        streamCaptureModeRelaxed=2,
        memcpyDefault=4,
        memsetAsync=set_async,
        hostRegister=host_register,
        hostUnregister=host_unregister,
    )
    cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        MemoryPool=MemoryPool,
        get_current_stream=current_stream,
        # Milliseconds: each thing that a stream does takes a microsecond of this clock.
        get_elapsed_time=lambda begin, end: (end.time - begin.time) / 1e3,
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
        alloc=Memory,
        PinnedMemory=lambda size: np.full(size, POISON, np.uint8).view(Pinned),
        PinnedMemoryPointer=lambda memory, offset: memory[offset:],
        alloc_pinned_memory=lambda size: np.full(size, POISON, np.uint8).view(Pinned),
        runtime=runtime,
        cublas=Cublas(),
    )
    # CuPy's own arrays, which are not splitc's, are computed by numpy, synchronously.
    return types.SimpleNamespace(
        cuda=cuda,
        ndarray=ndarray,
        matmul=lambda one, other: one.get() @ other.get(),
        get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
        get_default_pinned_memory_pool=lambda: PINNED,
    )
