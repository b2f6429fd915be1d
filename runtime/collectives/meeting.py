"""Meetings of engines of ranks on CPU devices, to sum and to send: in the C library, without Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from splitc.runtime.arrays.array import Array
from splitc.runtime.collectives.post import Post
from splitc.runtime.engines.operator_library import library_path, load_library
from splitc.runtime.errors import PackageError
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import cores
from splitc.runtime.ipc.shared_memory import create_memory, map_memory

# The most seconds that a rank waits for another one in a sum. A choice: longer than any run of an engine, so that only
# a rank that hangs meets it. One that dies is noticed at once.
PATIENCE = 120.0
# The alignment of a meeting's memory, in bytes: a line of the cache of x86 and most Arm processors.
LINE = 64
# The most ranks of a meeting: that of native/meeting.h.
MOST_RANKS = 1024
# Bytes that a rank that is a process copies at a time to where others read them.
STAGING = 1 << 20


class Meeting:
    """A meeting of ranks.

    - `memory`: for threads of this process, or shared by processes: zeros, or a meeting of the same number of ranks
      that another process made; see `shared_bytes`.
    - `post`: sends messages between ranks without shared memory. Then each rank has its own meeting.
    - `together`: the cores of all ranks (default: those that this process may use). With fewer cores than ranks, waits
      hardly spin, since the others need the cores.

    Raises PackageError if the C library was not built, or for more than MOST_RANKS.
    """

    def __init__(
        self, ranks: int, memory: Array | None = None, post: Post | None = None, together: int | None = None
    ) -> None:
        library = load_library()
        staging = 0 if memory is None else STAGING
        if ranks > MOST_RANKS:
            raise PackageError(f"collectives inside engines take at most {MOST_RANKS:,} ranks, and here are {ranks:,}")
        if memory is None:
            # Each pair of ranks has queues, and most send nothing. A file's pages are only taken when they are written.
            memory = map_memory(create_memory(library.splitc_meeting_bytes(0 if post else ranks, 0)))
        self._memory = memory
        self._post = post  # whose functions the library calls
        self.address = memory.ctypes.data
        if post is None:
            library.splitc_meeting_init(self.address, ranks, staging)
            library.splitc_meeting_set_cores(ctypes.c_void_p(self.address), together or cores())
        else:
            library.splitc_meeting_init_post(self.address, ranks, post.pointer)

    @property
    def in_memory(self) -> bool:
        """Whether the ranks are on one machine."""
        return self._post is None

    def join(self, place: int, patience: float = PATIENCE, gpu: GpuDevice | None = None) -> MeetingEnd:
        """The end of the rank at this place of its group. Its waits last `patience` seconds at most.

        A rank on a `gpu` copies its arrays to the host and back.
        """
        library = load_library()
        made = MeetingEnd(self, handle := library.splitc_end_of_meeting(self.address, place, patience))
        release_with(made, handle)
        if gpu is not None:
            library.splitc_end_on_gpu(handle, *gpu.copy_functions())
        return made

    def abort(self) -> None:
        """End all waits, now and later."""
        load_library().splitc_meeting_abort(self.address)


class MeetingEnd:
    """One rank's end of a meeting: a communicator on the host."""

    pointer: int | None = None
    capturable = False

    def __init__(self, meeting: Meeting, handle: int) -> None:
        self._meeting = meeting  # whose memory engines use
        self._library = load_library()
        self._handle = handle

    def registered(self) -> AbstractContextManager[Path]:
        return registered(self._handle)

    def connect(self) -> None:
        pass  # nothing to connect

    def begin(self, request: int) -> int:
        self._library.splitc_begin(self._handle, 1 + request)
        return 1 + request

    def check(self) -> None:
        pass  # an engine raises what goes wrong

    def fail(self, run: int) -> bool:
        return bool(self._library.splitc_fail(self._handle, run))

    def all_reduce(self, operation: int, code: int, given: int, made: int, count: int) -> int:
        """Reduce without an engine. Takes pointers and ONNX's code of the number type; returns 0 or an error code."""
        return int(self._library.splitc_all_reduce(self._handle, operation, code, given, made, count))


def shared_bytes(ranks: int) -> int:
    """The bytes of memory for a meeting of processes."""
    return int(load_library().splitc_meeting_bytes(ranks, STAGING))


def release_with(owner: object, handle: int) -> None:
    """Free an end once its owner and the last engine that uses it are gone."""
    released = weakref.finalize(owner, load_library().splitc_end_release, handle)
    released.atexit = False  # an engine may still run


@contextmanager
def registered(handle: int) -> Iterator[Path]:
    """The library's path. Operators that this thread registers inside the context use the end `handle`."""
    library = load_library()
    library.splitc_end_register(handle)
    try:
        yield library_path()
    finally:
        library.splitc_end_register(None)
