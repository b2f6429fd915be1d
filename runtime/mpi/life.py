"""Signs of life between the process of the session and those of the ranks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from splitc.runtime.mpi.abort import abort_all
from splitc.runtime.mpi.sending import sleep_after
from splitc.runtime.processes.awake import AwakeClock

# Seconds between two signs of life.
BEAT = 0.5
# Seconds of silence after which the session breaks, and ends all processes, which may take MPI a second or two. Those
# in which this process was not awake do not count, here as below.
SILENCE = 7.0
# Seconds of silence after which a rank ends all processes: it has lost the session.
PATIENCE = 8.0


class Life(threading.Thread):
    """Says again and again that this process is alive: to the session's, number 0, or from that one to all others."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(name="splitc life", daemon=True)
        self._communicator = communicator
        self._rank = communicator.rank
        self._others: Sequence[int] = [0] if self._rank else range(1, communicator.size)
        self._clock = AwakeClock()
        # How long each of them has been silent, by this clock, when it was last read.
        self._silent = dict.fromkeys(self._others, 0.0)
        self._read = 0.0
        # That this process was told to end.
        self._told = False
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        sending: list[Any] = []
        told: float | None = None
        while not self._ended.wait(BEAT):
            sending = [each for each in sending if not each.Test()]
            sending += [self._communicator.Isend(b"", each) for each in self._others]
            self._listen()
            if self._rank and self.silent(0) > PATIENCE:
                message = f"the session's process (0) gave no sign of life to rank {self._rank} for"
                _end_all(f"{message} {self.silent(0):.0f} s")
            told = self._read if told is None and self._told else told
            if told is not None and self._read - told > PATIENCE:
                _end_all(f"rank {self._rank} was told to end (SIGTERM), and the session's process (0) goes on")

    def _listen(self) -> None:
        now = self._clock.read()
        awake, self._read = now - self._read, now
        for other in self._others:
            self._silent[other] += awake
            while self._communicator.Iprobe(other):
                self._communicator.Recv(bytearray(), other)
                self._silent[other] = 0.0

    def end_soon(self) -> None:
        """A rank was told to end: it goes on until the session's process, which was told too, has ended the session.

        If that was not, this one ends them all after PATIENCE. For a handler of signals.
        """
        self._told = True  # no lock: it may come again meanwhile

    def silent(self, process: int) -> float:
        """Seconds since the last sign of life of a process, as far as this one was awake."""
        return self._silent[process]

    def end(self) -> None:
        """Say no more, before this process ends: all do, and receive what was said last."""
        self._ended.set()
        self.join()
        begin, all_ended = time.monotonic(), self._communicator.Ibarrier()
        while not all_ended.Test() and (waited := time.monotonic() - begin) < PATIENCE:
            self._listen()
            sleep_after(waited)
        self._listen()


def _end_all(why: str) -> None:
    print(f"error: {why}", file=sys.stderr, flush=True)
    abort_all()
