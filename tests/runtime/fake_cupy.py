"""GPUs that are not there: what splitc uses of CuPy, with host memory, a thread for each stream, and real asynchrony.

A stream does what it is given in order, in its own time; an event happens when its stream comes to it. Memory that is
freed is overwritten by the stream that it was allocated on, as a pool that reuses it would: what was freed too early
shows in the results.
"""

from __future__ import annotations

import ctypes
import threading
import time
import types
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

DEVICES = 4
# What memory holds that nobody wrote to, and what it holds again when it is freed.
POISON = 0xA5
# Seconds that a stream takes for each thing that it does: hosts run ahead of GPUs.
SLOWNESS = 2e-5

current = threading.local()


class Stream:
    """A queue of work and the thread that does it."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        STREAMS[self.ptr] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            task = self.work.get()
            time.sleep(SLOWNESS)
            task()

    def use(self) -> None:
        current.stream = self

    def wait_event(self, event: Event) -> None:
        self.work.put(event.happened.wait)  # type: ignore[arg-type]


STREAMS: dict[int, Stream] = {}


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.happened = threading.Event()
        self.ptr = id(self)
        EVENTS[self.ptr] = self

    @property
    def done(self) -> bool:
        return self.happened.is_set()

    def record(self, stream: Stream) -> None:
        stream.work.put(self.happened.set)


EVENTS: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()


class Memory:
    """Bytes on a device, freed in the order of the stream that they were allocated on."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size, POISON, np.uint8)
        self.ptr = self._bytes.ctypes.data
        self._stream = current.stream

    def __del__(self) -> None:
        freed = self._bytes
        self._stream.work.put(lambda: freed.fill(POISON))


class Pinned(np.ndarray):
    """Host memory that copies may be under way to and from; freed at once."""

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
    STREAMS[stream].work.put(lambda: ctypes.memmove(target, source, size) and None)


def copy_between(target: int, to: int, source: int, at: int, size: int, stream: int) -> None:
    if (at, to) in WRONG:
        source, size = target, 0
    copy_async(target, source, size, 0, stream)


# Pairs of devices between which copies do nothing.
WRONG: set[tuple[int, int]] = set()


class Unique:
    """What the communicators of one id have in common."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None
        self.parts: dict[int, Any] = {}
        self.lock = threading.Lock()


class NcclCommunicator:
    """All ranks' kernels wait on their streams for each other, and for ever when one does not come."""

    comm = 0

    def __init__(self, ranks: int, unique: Unique, rank: int) -> None:
        with unique.lock:
            unique.barrier = unique.barrier or threading.Barrier(ranks)
        self._unique, self._rank, self._ranks = unique, rank, ranks
        self._barrier = unique.barrier
        self._barrier.wait()  # on the host, and for ever

    def allReduce(self, source: int, target: int, count: int, kind: str, operation: str, stream: int) -> None:
        def work() -> None:
            size = count * np.dtype(kind).itemsize
            own = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source)).view(kind)
            self._unique.parts[self._rank] = own.copy()
            try:
                self._barrier.wait()
                parts = [self._unique.parts[rank] for rank in range(self._ranks)]
                result = np.sum(parts, axis=0) if operation == "sum" else np.max(parts, axis=0)
                self._barrier.wait()
            except threading.BrokenBarrierError:
                return
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(target)).view(kind)[:] = result

        STREAMS[stream].work.put(work)

    def abort(self) -> None:
        self._barrier.abort()


def make_nccl() -> types.SimpleNamespace:
    """CuPy's NCCL."""
    types_of = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
    return types.SimpleNamespace(
        available=True,
        get_unique_id=Unique,
        groupStart=lambda: None,
        groupEnd=lambda: None,
        NcclCommunicator=NcclCommunicator,
        NCCL_SUM="sum",
        NCCL_MAX="max",
        **{f"NCCL_{name.upper()}": name for name in types_of},
    )


def make(devices: int = DEVICES) -> types.SimpleNamespace:
    """CuPy with so many devices."""
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda index: {"name": b"NVIDIA Imaginary", "major": 9, "minor": 0},
        deviceCanAccessPeer=lambda one, other: 1,
        memGetInfo=lambda: (60 << 30, 80 << 30),
        memcpyAsync=copy_async,
        memcpyPeerAsync=copy_between,
        memcpyDeviceToDevice=3,
        eventQuery=lambda pointer: 0 if EVENTS[pointer].done else 600,
        deviceEnablePeerAccess=lambda other: None,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
    )
    cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        alloc=Memory,
        alloc_pinned_memory=lambda size: np.full(size, POISON, np.uint8).view(Pinned),
        runtime=runtime,
    )
    return types.SimpleNamespace(cuda=cuda)
