"""Meetings of ranks that are threads of a test, for each way in which ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from splitc.runtime.collectives.meeting import Meeting, MeetingEnd, shared_bytes
from splitc.runtime.collectives.post import Post
from splitc.runtime.ipc.shared_memory import create_memory, map_memory

# Ranks read each other's arrays, copy them to shared memory, or send each other messages.
KINDS = ("arrays", "memory", "messages")
# The C library's operations.
SUM, MAX = range(2)
# ONNX's codes of types (TensorProto.DataType). onnx_ir, which has them too, takes half a second to import.
CODES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "float64": 11, "uint32": 12}
CODES["bfloat16"] = 16
# Where a meeting's memory counts them: native/meeting.h's `bell.sleepers`.
_SLEEPERS = 644
Arrived = list["SimpleQueue[tuple[int, Any]]"]


class QueuedPost(Post):
    """Messages through queues, one for each receiving rank."""

    def __init__(self, place: int, arrived: Arrived) -> None:
        super().__init__(len(arrived), place)
        self._place = place
        self._queues = arrived

    def send(self, peer: int, message: Any) -> None:
        self._queues[peer].put((self._place, message))

    def receive(self, seconds: float) -> tuple[int, Any] | None:
        try:
            return self._queues[self._place].get(bool(seconds), seconds)
        except Empty:
            return None

    def broken(self) -> None:
        raise AssertionError("a function that the C library calls failed")


class Echo(QueuedPost):
    """One rank's messages, at place 0. Messages to the other ranks go to queues."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, [SimpleQueue() for _ in range(ranks)])

    def send(self, peer: int, message: Any) -> None:
        self._queues[0].put((peer, message))


def meet(ranks: int, patience: float = 20.0, kind: str = "arrays") -> list[MeetingEnd]:
    """The ends of a meeting of this many ranks, which wait for each other for `patience` seconds."""
    if kind == "messages":
        arrived: Arrived = [SimpleQueue() for _ in range(ranks)]
        posts = [QueuedPost(place, arrived) for place in range(ranks)]
        return [Meeting(ranks, post=post).join(place, patience) for place, post in enumerate(posts)]
    memory = None
    if kind == "memory":
        memory = map_memory(create_memory(shared_bytes(ranks)))
    meeting = Meeting(ranks, memory)
    return [meeting.join(rank, patience) for rank in range(ranks)]


def somebody_waits(meeting: Meeting) -> bool:
    """Whether a rank has looked in vain, and sleeps until something changes."""
    return bool(meeting._memory[_SLEEPERS : _SLEEPERS + 4].any())


def all_reduce(end: MeetingEnd, operation: int, array: np.ndarray[Any, Any]) -> tuple[int, np.ndarray[Any, Any]]:
    made = np.empty_like(array)
    status = end.all_reduce(operation, CODES[array.dtype.name], array.ctypes.data, made.ctypes.data, array.size)
    return status, made


def together(work: Callable[[int], Any], ranks: int) -> list[Any]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
