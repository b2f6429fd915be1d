"""Memory for arrays that another process reads.

It is a file without a name, whose descriptor is sent to the reader: nothing is left behind, however the processes end.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import Struct

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.ipc.demand import LEAST, Demand

# The alignment of arrays, in bytes.
ALIGNMENT = 64
# Arrays of a message that are smaller together, in bytes, are copied: to lend the memory would cost more. A copy
# of so many takes 5 microseconds, of four times as many 34 (measured).
SMALL = 1 << 18


_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Placed(Struct, frozen=True, array_like=True):
    """An array in shared memory: its first byte is at `offset`. `dtype` is numpy's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """numpy takes its time to say a type's name."""
    return str(dtype)


def create_memory(size: int) -> int:
    """A descriptor of new memory, which is zeros."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("splitc", os.MFD_CLOEXEC)
    else:  # other systems than Linux
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class _Map:
    """A map of memory, until its end. Python's own keeps a descriptor, and a pipeline has thousands of them."""

    def __init__(self, descriptor: int) -> None:
        size, how = os.fstat(descriptor).st_size, mmap.PROT_READ | mmap.PROT_WRITE
        address = _system.mmap(None, size, how, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"{size:,} bytes of shared memory can't be mapped")
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self._unmap = weakref.finalize(self, _system.munmap, address, size)
        self._unmap.atexit = False  # threads may still use it


def map_memory(descriptor: int) -> Array:
    """The memory as bytes, which are freed with the last view of them. Closes the descriptor."""
    try:
        return np.asarray(_Map(descriptor))
    finally:
        os.close(descriptor)


def place(shapes: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> tuple[list[Placed], int]:
    """Places for arrays with these names, shapes and types, and their total size in bytes."""
    placed, size = [], 0
    for name, shape, dtype in shapes:
        placed.append(Placed(name, _name(dtype), shape, size))
        size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return placed, size


def view(memory: Array, placed: Placed) -> Array:
    """The array at its place in the memory."""
    array: Array = np.ndarray(placed.shape, number_type(placed.dtype), memory, placed.offset)
    return array


class SharedArrays(Struct, frozen=True, array_like=True):
    """A Lender's message about arrays in one of its buffers.

    - `size`: that of a new buffer, whose descriptor comes with the message.
    - `dropped`: buffers that are never used again.
    """

    buffer: int
    placed: tuple[Placed, ...]
    size: int = 0
    dropped: tuple[int, ...] = ()


@dataclass(eq=False)
class _Buffer:
    """A buffer of a Lender. `descriptor` is that of its memory, until it is sent.

    It may have arrays of `allocate`, which were not sent yet: `placed`, if anybody still has the `first` of them.
    """

    number: int
    memory: Array
    descriptor: int | None
    placed: Sequence[Placed] = ()
    first: Callable[[], Array | None] = lambda: None

    @property
    def size(self) -> tuple[int, int]:
        """Its bytes, and its number: buffers of one size are told apart."""
        return self.memory.nbytes, self.number


class Lender:
    """Buffers for arrays that another process receives, and returns when it no longer uses them.

    There are as many as are in use at a time. Buffers that are many times larger than needed recently are dropped.
    `pin` is called with the memory of each new buffer. Any thread may use it: a GPU's rank allocates the outputs of the
    next request while another thread sends those of the previous one.
    """

    def __init__(self, pin: Callable[[Array], None] | None = None) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._buffers: dict[int, _Buffer] = {}
        self._free: list[_Buffer] = []  # in the order of their sizes
        self._dropped: list[int] = []
        self._demand = Demand()
        self._allocated: list[_Buffer] = []

    def allocate(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, Array]:
        """Arrays in a free buffer, to be written to and then sent."""
        if not shapes:
            return {}
        placed, size = place((name, shape, dtype) for name, (shape, dtype) in shapes.items())
        with self._lock:
            buffer = self._take(size)
            arrays = {at.name: view(buffer.memory, at) for at in placed}
            buffer.placed, buffer.first = placed, weakref.ref(next(iter(arrays.values())))
            self._allocated.append(buffer)
        return arrays

    def send(self, arrays: Sequence[tuple[str, Array]]) -> tuple[SharedArrays | None, list[int]]:
        """The message about the arrays for the other process, and the descriptor of a new buffer.

        Arrays that are not from `allocate` are copied to a buffer. The caller closes the descriptor.
        """
        if not arrays:
            return None, []
        with self._lock:
            buffer = next((known for known in self._allocated if known.first() is arrays[0][1]), None)
            if buffer is None:
                buffer = self._copy(arrays)
            else:
                self._allocated.remove(buffer)
            new = [] if buffer.descriptor is None else [buffer.descriptor]
            buffer.descriptor = None
            dropped, self._dropped = tuple(self._dropped), []
            return SharedArrays(buffer.number, tuple(buffer.placed), buffer.memory.nbytes if new else 0, dropped), new

    def _copy(self, arrays: Sequence[tuple[str, Array]]) -> _Buffer:
        placed, size = place((name, array.shape, array.dtype) for name, array in arrays)
        buffer = self._take(size)
        buffer.placed = placed
        try:
            for at, (_, array) in zip(placed, arrays, strict=True):
                view(buffer.memory, at)[...] = array
        except BaseException:
            insort(self._free, buffer, key=_size)
            raise
        return buffer

    def give_back(self, numbers: Iterable[int]) -> None:
        """Mark these buffers as free: the other process no longer uses them."""
        with self._lock:
            for number in numbers:
                insort(self._free, self._buffers[number], key=_size)

    def close(self) -> None:
        """Free the buffers, except those with arrays still in use."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                self._drop(buffer)
            self._allocated, self._free = [], []

    def _take(self, size: int) -> _Buffer:
        """The smallest free buffer that is large enough, or a new one."""
        # Arrays of a request that failed are never sent: whoever wrote to them has dropped them.
        for buffer in [known for known in self._allocated if known.first() is None]:
            self._allocated.remove(buffer)
            insort(self._free, buffer, key=_size)
        free, most = self._free, self._demand.most(size)
        while free and free[-1].memory.nbytes > most:
            self._drop(free.pop())
        if (smallest := bisect_left(free, (size, 0), key=_size)) < len(free):
            return free.pop(smallest)
        if free:  # a new one takes the place of one that is too small
            self._drop(free.pop())
        return self._make(size)

    def _make(self, size: int) -> _Buffer:
        """A new buffer."""
        descriptor = create_memory(max(LEAST, 1 << (size - 1).bit_length()))
        try:
            buffer = _Buffer(next(self._numbers), map_memory(os.dup(descriptor)), descriptor)
            if self._pin is not None:
                self._pin(buffer.memory)
        except BaseException:
            os.close(descriptor)
            raise
        self._buffers[buffer.number] = buffer
        return buffer

    def _drop(self, buffer: _Buffer) -> None:
        """Free a buffer, and let the other process free it with the next message."""
        del self._buffers[buffer.number]
        if buffer.descriptor is None:
            self._dropped.append(buffer.number)
        else:
            os.close(buffer.descriptor)


_size = attrgetter("size")


class Borrower:
    """The receiving end of a Lender. `descriptor` returns the descriptor that came with a message."""

    def __init__(self, descriptor: Callable[[], int]) -> None:
        self._descriptor = descriptor
        self._buffers: dict[int, Array] = {}
        self._unused: deque[int] = deque()
        # Of the arrays that were given out, and of those that ended.
        self._lent: dict[int, _Lent] = {}
        self._ended: deque[_Lent] = deque()

    def look(self, shared: SharedArrays | None) -> list[tuple[str, Array]]:
        """The arrays of a message, in place: valid until the other process reuses their buffer."""
        if shared is None:
            return []
        for number in shared.dropped:
            del self._buffers[number]
        if shared.size:
            self._buffers[shared.buffer] = map_memory(self._descriptor())
        return [(at.name, view(self._buffers[shared.buffer], at)) for at in shared.placed]

    def receive(self, shared: SharedArrays | None) -> dict[str, Array]:
        """The arrays of a message. Their buffer is returned once they are no longer used."""
        arrays = self.look(shared)
        if shared is None:
            return {}
        size = shared.placed[-1].offset + arrays[-1][1].nbytes
        if size < SMALL:
            copies = {name: array.copy() for name, array in arrays}
            self._unused.append(shared.buffer)  # only now: another thread may give it back at once
            return copies
        loan = _Loan(self._buffers[shared.buffer][:size])
        self._lent[shared.buffer] = _Lent(loan, shared.buffer, self._ended)
        lent = np.asarray(loan)
        return {at.name: view(lent, at) for at in shared.placed}

    def close(self) -> None:
        """Free the buffers, except those with arrays still in use."""
        self._buffers.clear()

    def unused(self) -> list[int]:
        """The buffers with no arrays in use, to be returned."""
        for _ in range(len(self._ended)):
            buffer = self._ended.popleft().buffer
            del self._lent[buffer]
            self._unused.append(buffer)
        return [self._unused.popleft() for _ in range(len(self._unused))]


class _Loan:
    """A buffer's memory. All views of it refer to this, so it ends with the last of them."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class _Lent(weakref.ref[_Loan]):
    """Is appended to `ended` when the loan of a buffer ends, without Python code: there it would drop an interrupt."""

    __slots__ = ("buffer",)
    buffer: int

    def __new__(cls, loan: _Loan, buffer: int, ended: deque[_Lent]) -> _Lent:
        made = super().__new__(cls, loan, ended.append)
        made.buffer = buffer
        return made

    def __init__(self, loan: _Loan, buffer: int, ended: deque[_Lent]) -> None:
        super().__init__(loan, ended.append)  # type: ignore[call-arg]  # what `__new__` takes, object's takes not
