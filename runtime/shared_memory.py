"""Memory for arrays that another process reads.

It is a file without a name, whose descriptor is sent to the reader: nothing is left behind, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitc.runtime.arrays import Array, number_type

# The alignment of arrays, and the least size of a slot, in bytes.
ALIGNMENT, LEAST = 64, 1 << 16


@dataclass(frozen=True)
class Placed:
    """An array in a slot: its first byte is at `offset`. `dtype` is numpy's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


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


class SlotWriter:
    """Memory for the arrays of `count` requests in flight. Request k uses slot k modulo `count`."""

    def __init__(self, count: int) -> None:
        self._slots = [np.empty(0, np.uint8)] * count

    def put(self, number: int, arrays: Sequence[tuple[str, Array]]) -> tuple[list[Placed], int | None]:
        """Copy the arrays of a request to its slot.

        Returns where they are, and a descriptor if the slot has new memory: the caller sends it to the readers, and
        closes it.
        """
        placed, size = [], 0
        for name, array in arrays:
            placed.append(Placed(name, str(array.dtype), array.shape, size))
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        slot, descriptor = number % len(self._slots), None
        if size > self._slots[slot].nbytes:
            descriptor = create_memory(max(LEAST, size))
            self._slots[slot] = map_memory(os.dup(descriptor))
        for each, (_, array) in zip(placed, arrays, strict=True):
            _view(self._slots[slot], each)[...] = array
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
        return {each.name: _view(slot, each) for each in placed}


def _view(slot: Array, placed: Placed) -> Array:
    dtype = number_type(placed.dtype)
    count = int(np.prod(placed.shape, dtype=np.int64))
    return slot[placed.offset : placed.offset + count * dtype.itemsize].view(dtype).reshape(placed.shape)
