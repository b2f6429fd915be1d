"""Messages between engines of ranks without shared memory: callbacks of the C library."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array

# native/meeting.h
OK, FAILED, LATE, _, APART = range(5)
# A message begins with the number of its run. One that has no more says that the sender fails in it.
RUN = 8
_POINTER, _INT, _SIZE, _RUN = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
_SEND = ctypes.CFUNCTYPE(_INT, _RUN, _INT, _POINTER, _SIZE, _POINTER, _SIZE)
_WAIT = ctypes.CFUNCTYPE(_INT, _RUN, _INT, _POINTER, _SIZE, ctypes.c_double)
_TAKE = ctypes.CFUNCTYPE(None, _INT, _POINTER, _SIZE)
_FAIL = ctypes.CFUNCTYPE(None, _RUN)


class _Post(ctypes.Structure):
    """The C library's `Post`."""

    _fields_ = (("send", _SEND), ("wait", _WAIT), ("take", _TAKE), ("fail", _FAIL))


class Post(ABC):
    """The end of the rank at a place of a group. `pointer` is that of the C library's `Post`.

    Ranks are identified by their places. Subclasses send the messages.
    """

    def __init__(self, ranks: int, place: int) -> None:
        self._others = [rank for rank in range(ranks) if rank != place]
        self._arrived: dict[int, deque[Array]] = {rank: deque() for rank in self._others}
        # The runs in which a rank failed. A rank may be in a later one by now.
        self._failed: set[int] = set()
        kinds: list[tuple[Any, Callable[..., int | None]]] = [
            (_SEND, self._send),
            (_WAIT, self._wait),
            (_TAKE, self._take),
            (_FAIL, self._fail),
        ]
        self._post = _Post(*(kind(self._guarded(function)) for kind, function in kinds))
        self.pointer = ctypes.addressof(self._post)

    @abstractmethod
    def send(self, peer: int, message: Array) -> None:
        """Send bytes, which must not change any more. Does not wait until they are received."""

    @abstractmethod
    def receive(self, seconds: float) -> tuple[int, Array] | None:
        """The next message of any rank, with that rank. None if none arrives within these seconds.

        Messages of one rank arrive in the order of sending.
        """

    @abstractmethod
    def broken(self) -> None:
        """This end failed, and can't be used again: the others would wait for ever."""

    def _guarded(self, function: Callable[..., int | None]) -> Callable[..., int | None]:
        """A callback that ends the process on an error: ctypes would print it and go on."""

        def guarded(*arguments: Any) -> int | None:
            try:
                return function(*arguments)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                self.broken()
                os._exit(1)

        return guarded

    def _send(self, run: int, peer: int, head: int, head_size: int, value: int | None, size: int) -> int:
        if run in self._failed:
            return FAILED
        message = np.empty(RUN + head_size + size, np.uint8)
        message[:RUN].view(np.uint64)[0] = run
        ctypes.memmove(message.ctypes.data + RUN, head, head_size)
        if value is not None:
            ctypes.memmove(message.ctypes.data + RUN + head_size, value, size)
        self.send(peer, message)
        return OK

    def _wait(self, run: int, peer: int, head: int, head_size: int, patience: float) -> int:
        arrived, deadline = self._arrived[peer], time.monotonic() + patience
        while True:
            while arrived and _run_of(arrived[0]) in self._failed and _run_of(arrived[0]) < run:
                arrived.popleft()
            if run in self._failed:
                return FAILED
            if arrived and _run_of(arrived[0]) != run:
                return APART
            if arrived:
                ctypes.memmove(head, arrived[0].ctypes.data + RUN, head_size)
                return OK
            if not self._receive(max(0.0, deadline - time.monotonic())):
                return LATE

    def _receive(self, seconds: float) -> bool:
        """Wait for a message, and receive all that have arrived. Returns whether there were any."""
        received = first = self.receive(seconds)
        while received is not None:
            source, message = received
            if message.size == RUN:
                self._failed.add(_run_of(message))
            else:
                self._arrived[source].append(message)
            received = self.receive(0.0)
        return first is not None

    def _take(self, peer: int, value: int | None, size: int) -> None:
        message = self._arrived[peer].popleft()
        if value is not None:
            ctypes.memmove(value, message.ctypes.data + message.size - size, size)

    def _fail(self, run: int) -> None:
        self._failed.add(run)
        message = np.array([run], np.uint64).view(np.uint8)
        for other in self._others:
            self.send(other, message)


def _run_of(message: Array) -> int:
    return int(message[:RUN].view(np.uint64)[0])
