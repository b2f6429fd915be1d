"""Time in which this process was awake: not stopped by Ctrl-Z, nor frozen with its container or its machine.

Only awake time counts towards the silence of another process.
"""

from __future__ import annotations

import time

# The most seconds between two readings that count. A process that works reads its clock every half second (LOOK, BEAT);
# twice that is a choice: with more, a process that was stopped would take its own sleep for the ranks' silence.
MOST = 1.0


class AwakeClock:
    """Counts the seconds between its readings, at most MOST of them each. One thread at a time reads it."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._read = time.monotonic()

    def read(self) -> float:
        """The seconds counted so far."""
        now = time.monotonic()
        self._counted += min(now - self._read, MOST)
        self._read = now
        return self._counted
