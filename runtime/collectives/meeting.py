"""Where the engines of ranks on CPU devices meet to sum, without Python: in the C library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitc.runtime.collectives.native_library import find_library, load_library

# Seconds that a rank waits for another one in a sum.
PATIENCE = 120.0
# Memory of a meeting begins at a multiple of this.
LINE = 64


class Meeting:
    """A meeting of so many ranks, which are threads of this process. Raises PackageError without the C library."""

    def __init__(self, ranks: int) -> None:
        library = load_library()
        self._memory = ctypes.create_string_buffer(library.splitc_meeting_bytes(ranks, 0) + LINE)
        self._address = -(-ctypes.addressof(self._memory) // LINE) * LINE
        library.splitc_meeting_init(self._address, ranks, 0)

    def join(self, place: int) -> MeetingEnd:
        """The end of the rank at this place."""
        return MeetingEnd(self, load_library().splitc_end_of_meeting(self._address, place, PATIENCE))

    def abort(self) -> None:
        """Let no rank wait any more, now or later."""
        load_library().splitc_meeting_abort(self._address)


class MeetingEnd:
    """One rank's end of a meeting: what its engine sums with."""

    def __init__(self, meeting: Meeting, handle: Any) -> None:
        self._meeting = meeting  # keeps the memory
        self._library = load_library()
        self._handle = handle

    @contextmanager
    def registered(self) -> Iterator[Path]:
        """The library that an engine's operators are to be registered from meanwhile, on this thread."""
        path = find_library()
        assert path is not None
        self._library.splitc_end_register(self._handle)
        try:
            yield path
        finally:
            self._library.splitc_end_register(None)

    def begin(self) -> None:
        """A request begins. To be called once for each, by all ranks in the same order."""
        self._library.splitc_begin(self._handle)

    def fail(self) -> bool:
        """The rank takes no further part in the request: sums of the others, which would wait for it, fail at once."""
        self._library.splitc_fail(self._handle)
        return True

    def all_reduce(self, operation: int, code: int, count: int, given: int, made: int) -> int:
        """Sum without an engine; all as `splitc_all_reduce` has it. Returns 0, or what went wrong."""
        return int(self._library.splitc_all_reduce(self._handle, operation, code, given, made, count))

    def close(self) -> None:
        """Let go of it. To be called when its engines are gone."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.splitc_end_free(handle)
