"""The memory needed recently: memory that is many times larger is returned."""

from __future__ import annotations

import math

# Memory this many times larger than what was needed is given back, after at least so many requests for less. To take
# and give back a gigabyte costs as much as to fill it, so that it must not happen often.
WASTE, RECENT = 8, 1000
# Bytes that are never too much.
LEAST = 1 << 16


class Demand:
    """The most bytes that were needed at a time, of RECENT to twice as many requests for memory."""

    def __init__(self) -> None:
        self._count = self._most = 0
        self._before = math.inf

    def most(self, size: int) -> float:
        """Record the bytes needed now. Returns the most bytes to keep."""
        self._count += 1
        self._most = max(self._most, size, LEAST)
        kept = WASTE * max(self._before, self._most)
        if self._count == RECENT:
            self._before, self._count, self._most = self._most, 0, 0
        return kept
