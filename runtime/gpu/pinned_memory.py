"""Memory of the host that a GPU copies from and to directly."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.ipc.demand import Demand


class Pins:
    """Memory that is registered with a GPU, and unregistered before it is freed; and pinned memory of CuPy's pool.

    The pool keeps freed memory for later.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy, self._cuda = cupy, cupy.cuda
        self._index = index
        self._demand = Demand()
        self._largest = 0
        self._ends: list[weakref.finalize[Any, Any]] = []
        self._kept: list[object] = []

    def add(self, memory: npt.NDArray[np.uint8]) -> None:
        """Register the memory. It is unregistered once this array and all its views are gone."""
        address = memory.ctypes.data
        with self._cuda.Device(self._index):
            self._cuda.runtime.hostRegister(address, memory.nbytes, 0)
        # CUDA must not have memory that is unmapped: the map, which is the array's base, stays until it was told. With
        # Python 3.13 and numpy 2.5 it would go before the array's end is told.
        end = weakref.finalize(memory, _unregister, self._cuda, self._index, address, memory.base)
        end.atexit = False  # the system does so, without waiting for a GPU that hangs
        self._ends = [end for end in self._ends if end.alive] + [end]

    def take(self, size: int, trims: bool) -> Any:
        """Pinned memory from the pool. With `trims`, the pool first frees blocks that are many times too large."""
        most = self._demand.most(size)
        if trims and self._largest > most:
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()
            self._largest = 0
        self._largest = max(self._largest, size)
        return self._cuda.alloc_pinned_memory(size)

    def keep(self) -> None:
        """Keep the memory for ever: the GPU may still copy."""
        self._kept += [end.detach() for end in self._ends]


def _unregister(cuda: Any, index: int, address: int, _map: object) -> None:
    with suppress(cuda.runtime.CUDARuntimeError), cuda.Device(index):  # of a GPU that has failed, all is gone
        cuda.runtime.hostUnregister(address)
