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
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.ipc.demand import LEAST, Demand

# The alignment of arrays, in bytes.
ALIGNMENT = 64
# Arrays of a message that are smaller together, in bytes, are copied: to lend the memory would cost more.
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
    """The memory as bytes, which are freed with the last array that is cut from them. Closes the descriptor."""
    try:
        return np.asarray(_Map(descriptor))
    finally:
        os.close(descriptor)


def place(shapes: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> tuple[list[Placed], int]:
    """Places for arrays of these names, shapes and types, and the bytes of all."""
    placed, size = [], 0
    for name, shape, dtype in shapes:
        placed.append(Placed(name, _name(dtype), shape, size))
        size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return placed, size


def view(memory: Array, placed: Placed) -> Array:
    """The array at its place in the memory."""
    array: Array = np.ndarray(placed.shape, number_type(placed.dtype), memory, placed.offset)
    return array


class Sent(Struct, frozen=True, array_like=True):
    """Arrays in a buffer of a Lender. `size` is that of a new buffer, whose descriptor comes with the message.

    `dropped` are buffers that are never used again.
    """

    buffer: int
    placed: tuple[Placed, ...]
    size: int = 0
    dropped: tuple[int, ...] = ()


class Lender:
    """Buffers for arrays that another process gets, and gives back when it has no more use for them.

    There are as many as are in use at a time, and those that are many times larger than what is needed lately are
    dropped. `pin` is called with the memory of each new buffer. Any thread may use it: a GPU's rank takes room for the
    next request while another thread sends the outputs of the one before.
    """

    def __init__(self, pin: Callable[[Array], None] | None = None) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._buffers: dict[int, Array] = {}
        self._free: list[tuple[int, int]] = []  # their bytes and numbers, in order
        self._unsent: dict[int, int] = {}
        self._dropped: list[int] = []
        self._demand = Demand()
        # The first of the arrays of `room`, as long as they are wanted and not sent; their buffer, and their places.
        self._placed: list[tuple[weakref.ref[Array], int, list[Placed]]] = []

    def room(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, Array]:
        """Arrays in a free buffer, to be written to and then sent."""
        if not shapes:
            return {}
        placed, size = place((name, *each) for name, each in shapes.items())
        with self._lock:
            number = self._take(size)
            arrays = {each.name: view(self._buffers[number], each) for each in placed}
            self._placed.append((weakref.ref(next(iter(arrays.values()))), number, placed))
        return arrays

    def send(self, arrays: Sequence[tuple[str, Array]]) -> tuple[Sent | None, list[int]]:
        """What to tell the other process of the arrays, and the descriptor of a buffer that it does not know.

        Arrays that are not from `room` are copied to a buffer. The caller closes the descriptor.
        """
        if not arrays:
            return None, []
        with self._lock:
            number, placed = self._find(arrays[0][1]) or self._copy(arrays)
            new = [self._unsent.pop(number)] if number in self._unsent else []
            dropped, self._dropped = tuple(self._dropped), []
            return Sent(number, tuple(placed), self._buffers[number].nbytes if new else 0, dropped), new

    def _find(self, first: Array) -> tuple[int, list[Placed]] | None:
        """The buffer and the places of arrays of `room` that begin with this one. They are not awaited any more."""
        for place, (known, number, placed) in enumerate(self._placed):
            if known() is first:
                del self._placed[place]
                return number, placed
        return None

    def _copy(self, arrays: Sequence[tuple[str, Array]]) -> tuple[int, list[Placed]]:
        placed, size = place((name, array.shape, array.dtype) for name, array in arrays)
        number = self._take(size)
        try:
            for each, (_, array) in zip(placed, arrays, strict=True):
                view(self._buffers[number], each)[...] = array
        except BaseException:
            self._add_free([number])
            raise
        return number, placed

    def give_back(self, buffers: Iterable[int]) -> None:
        """The other process has no more use for these."""
        with self._lock:
            self._add_free(buffers)

    def _add_free(self, buffers: Iterable[int]) -> None:
        for number in buffers:
            insort(self._free, (self._buffers[number].nbytes, number))

    def close(self) -> None:
        """Free the buffers, but for those that somebody still has arrays of."""
        with self._lock:
            for number in list(self._buffers):
                self._drop(number)
            self._placed, self._free = [], []

    def _take(self, size: int) -> int:
        """The smallest free buffer that is large enough, or a new one."""
        if self._placed:
            # Arrays of a request that failed are never sent: whoever wrote to them has dropped them.
            self._add_free(number for known, number, _ in self._placed if known() is None)
            self._placed = [each for each in self._placed if each[0]() is not None]
        free, most = self._free, self._demand.most(size)
        while free and free[-1][0] > most:
            self._drop(free.pop()[1])
        if (smallest := bisect_left(free, (size, 0))) < len(free):
            return free.pop(smallest)[1]
        if free:  # a new one takes the place of one that is too small
            self._drop(free.pop()[1])
        return self._make(size)

    def _make(self, size: int) -> int:
        """A new buffer."""
        number, descriptor = next(self._numbers), create_memory(max(LEAST, 1 << (size - 1).bit_length()))
        try:
            memory = map_memory(os.dup(descriptor))
            if self._pin is not None:
                self._pin(memory)
        except BaseException:
            os.close(descriptor)
            raise
        self._buffers[number], self._unsent[number] = memory, descriptor
        return number

    def _drop(self, number: int) -> None:
        """Free a buffer, and have the other process do so with what it is sent next."""
        del self._buffers[number]
        if number in self._unsent:
            os.close(self._unsent.pop(number))
        else:
            self._dropped.append(number)


class Borrower:
    """The other end of a Lender. `descriptor` gives the descriptor that came with what was sent."""

    def __init__(self, descriptor: Callable[[], int]) -> None:
        self._descriptor = descriptor
        self._buffers: dict[int, Array] = {}
        self._unused: deque[int] = deque()

    def look(self, sent: Sent | None) -> list[tuple[str, Array]]:
        """The arrays that were sent, where they are: valid until the other process uses their buffer again."""
        if sent is None:
            return []
        for number in sent.dropped:
            del self._buffers[number]
        if sent.size:
            self._buffers[sent.buffer] = map_memory(self._descriptor())
        return [(each.name, view(self._buffers[sent.buffer], each)) for each in sent.placed]

    def receive(self, sent: Sent | None) -> dict[str, Array]:
        """The arrays that were sent. They stay valid as long as anybody has them, then their buffer goes back."""
        arrays = self.look(sent)
        if sent is None:
            return {}
        size = sent.placed[-1].offset + arrays[-1][1].nbytes
        if size < SMALL:
            self._unused.append(sent.buffer)
            return {name: array.copy() for name, array in arrays}
        lent = np.asarray(_Loan(self._buffers[sent.buffer][:size], sent.buffer, self._unused))
        return {each.name: view(lent, each) for each in sent.placed}

    def close(self) -> None:
        """Free the buffers, but for those that somebody still has arrays of."""
        self._buffers.clear()

    def unused(self) -> list[int]:
        """The buffers that nobody has arrays of any more, to be given back."""
        return [self._unused.popleft() for _ in range(len(self._unused))]


class _Loan:
    """A buffer's memory. All arrays that are cut from it refer to this, so it ends with the last of them."""

    def __init__(self, memory: Array, buffer: int, unused: deque[int]) -> None:
        self._memory, self._buffer, self._unused = memory, buffer, unused
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._unused.append(self._buffer)  # no lock: this may run at any time
