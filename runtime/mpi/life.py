"""Heartbeats between the session's process and those of the ranks, and the end of all processes at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from splitc.runtime.mpi.messenger import sleep_after
from splitc.runtime.processes.awake import AwakeClock

# Seconds that mpirun gets to forward what was printed: what it has not read when the processes end is lost. A choice,
# and short beside the 10 s in which an error is promised.
PRINTING = 0.3


def abort_all() -> None:
    """End all processes of all hosts, also those that hang. Does not return.

    It aborts COMM_WORLD: for a copied communicator, MPICH waits for the processes on other hosts.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(PRINTING)

    MPI.COMM_WORLD.Abort(1)


# Seconds between two heartbeats. A choice: 14 are missing before a rank is said to hang.
BEAT = 0.5
# Seconds without a heartbeat after which the session breaks and aborts all processes, which may take MPI a second or
# two; an error is promised within 10. Only seconds in which this process was awake count.
SILENCE = 7.0
# Seconds without a heartbeat of the session's process after which a rank aborts all processes.
PATIENCE = 8.0


class Life(threading.Thread):
    """Sends heartbeats: a rank's to process 0, the session's process, and process 0's to all ranks."""

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
            sending = [message for message in sending if not message.Test()]
            sending += [self._communicator.Isend(b"", process) for process in self._others]
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
        """This rank got SIGTERM. It goes on until process 0, which got it too, has ended the session.

        If process 0 does not end it within PATIENCE, this rank aborts all processes. For a signal handler.
        """
        self._told = True  # no lock: it may come again meanwhile

    def silent(self, process: int) -> float:
        """The seconds since a process's last heartbeat, in which this process was awake."""
        return self._silent[process]

    def end(self) -> None:
        """Stop sending, before this process ends, and receive the last heartbeats. All processes must call this."""
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
