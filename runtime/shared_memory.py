"""Memory for arrays that another process reads.

It is a file without a name, whose descriptor is sent to the reader: nothing is left behind, however the processes end.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from splitc.runtime.arrays import Array, number_type

# The alignment of arrays, and the least size of memory, in bytes.
ALIGNMENT, LEAST = 64, 1 << 16
# Arrays of a message that are smaller together, in bytes, are copied: to lend the memory would cost more.
SMALL = 1 << 18


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


def map_memory(descriptor: int) -> Array:
    """The memory as bytes, which are freed with the last array that is cut from them. Closes the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8)
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


class SlotWriter:
    """Memory for the arrays of `count` requests in flight. Request k uses slot k modulo `count`."""

    def __init__(self, count: int) -> None:
        self._slots = [np.empty(0, np.uint8)] * count

    def put(self, number: int, arrays: Sequence[tuple[str, Array]]) -> tuple[list[Placed], int | None]:
        """Copy the arrays of a request to its slot.

        Returns where they are, and a descriptor if the slot has new memory: the caller sends it to the readers, and
        closes it.
        """
        placed, size = place((name, array.shape, array.dtype) for name, array in arrays)
        slot, descriptor = number % len(self._slots), None
        memory = self._slots[slot]
        try:
            if size > memory.nbytes:
                descriptor = create_memory(max(LEAST, size))
                memory = map_memory(os.dup(descriptor))
            for each, (_, array) in zip(placed, arrays, strict=True):
                view(memory, each)[...] = array
        except BaseException:  # the readers still have the memory from before
            if descriptor is not None:
                os.close(descriptor)
            raise
        self._slots[slot] = memory
        return placed, descriptor


class SlotReader:
    """The other end of a SlotWriter."""

    def __init__(self, count: int) -> None:
        self._slots = [np.empty(0, np.uint8)] * count

    def renew(self, number: int, descriptor: int) -> None:
        """The slot of this request has new memory."""
        self._slots[number % len(self._slots)] = map_memory(descriptor)

    def get(self, number: int, placed: Sequence[Placed]) -> dict[str, Array]:
        """The arrays of a request, in the shared memory: they are valid until the request is done."""
        slot = self._slots[number % len(self._slots)]
        return {each.name: view(slot, each) for each in placed}


class Sent(Struct, frozen=True, array_like=True):
    """Arrays in a buffer of a Lender. `size` is that of a new buffer, whose descriptor comes behind the message."""

    buffer: int
    placed: tuple[Placed, ...]
    size: int = 0


class Lender:
    """Buffers for arrays that another process gets, and gives back when it has no more use for them.

    `pin` is called with the memory of each new buffer.
    """

    def __init__(self, pin: Callable[[Array], None] | None = None) -> None:
        self._pin = pin
        self._buffers: list[Array] = []
        self._free: set[int] = set()
        self._unsent: dict[int, int] = {}
        # The first of the arrays of `room`, as long as they are wanted and not sent; their buffer, and their places.
        self._placed: list[tuple[weakref.ref[Array], int, list[Placed]]] = []

    def room(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, Array]:
        """Arrays in a free buffer, to be written to and then sent."""
        placed, size = place((name, *each) for name, each in shapes.items())
        number = self._take(size)
        arrays = {each.name: view(self._buffers[number], each) for each in placed}
        if arrays:
            self._placed.append((weakref.ref(next(iter(arrays.values()))), number, placed))
        else:
            self._free.add(number)
        return arrays

    def send(self, arrays: Mapping[str, Array]) -> tuple[Sent | None, int | None]:
        """What to tell the other process of the arrays, and a descriptor if it does not know the buffer.

        Arrays that are not from `room` are copied to a buffer. The caller closes the descriptor.
        """
        if not arrays:
            return None, None
        known = self._find(arrays)
        if known is None:
            own = self.room({name: (array.shape, array.dtype) for name, array in arrays.items()})
            for name, array in arrays.items():
                own[name][...] = array
            known = len(self._placed) - 1
        _, number, placed = self._placed.pop(known)
        descriptor = self._unsent.pop(number, None)
        return Sent(number, tuple(placed), 0 if descriptor is None else self._buffers[number].nbytes), descriptor

    def _find(self, arrays: Mapping[str, Array]) -> int | None:
        """Which of those that were not sent yet these are."""
        first = next(iter(arrays.values()))
        return next((place for place, (known, _, _) in enumerate(self._placed) if known() is first), None)

    def give_back(self, buffers: Iterable[int]) -> None:
        """The other process has no more use for these."""
        self._free.update(buffers)

    def close(self) -> None:
        """Free the buffers, but for those that somebody still has arrays of."""
        for descriptor in self._unsent.values():
            os.close(descriptor)
        self._buffers, self._placed = [], []
        self._free, self._unsent = set(), {}

    def _take(self, size: int) -> int:
        """The smallest free buffer that is large enough, or a new one."""
        # Arrays of a request that failed are never sent: whoever wrote to them has dropped them.
        self._free.update(number for known, number, _ in self._placed if known() is None)
        self._placed = [each for each in self._placed if each[0]() is not None]
        fit = [number for number in self._free if self._buffers[number].nbytes >= size]
        if fit:
            number = min(fit, key=lambda each: (self._buffers[each].nbytes, each))
            self._free.remove(number)
            return number
        number = len(self._buffers)
        self._unsent[number] = create_memory(max(LEAST, 1 << (size - 1).bit_length()))
        self._buffers.append(map_memory(os.dup(self._unsent[number])))
        if self._pin is not None:
            self._pin(self._buffers[number])
        return number


class Borrower:
    """The other end of a Lender. Its arrays stay valid as long as anybody has them, then their buffer goes back."""

    def __init__(self) -> None:
        self._buffers: dict[int, Array] = {}
        self._unused: deque[int] = deque()

    def receive(self, sent: Sent, descriptor: int | None) -> dict[str, Array]:
        """The arrays that were sent."""
        if descriptor is not None:
            self._buffers[sent.buffer] = map_memory(descriptor)
        memory = self._buffers[sent.buffer]
        last = sent.placed[-1]
        size = last.offset + math.prod(last.shape) * number_type(last.dtype).itemsize
        if size < SMALL:
            copied = {each.name: view(memory, each).copy() for each in sent.placed}
            self._unused.append(sent.buffer)
            return copied
        lent = np.asarray(_Loan(memory[:size], sent.buffer, self._unused))
        return {each.name: view(lent, each) for each in sent.placed}

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
