"""The process of a device's ranks, in which no thread can be started for a second rank."""

from __future__ import annotations

import threading

from splitc.runtime.processes import rank

START = threading.Thread.start


def main(descriptor: int) -> None:
    """As `splitc.runtime.processes.rank.main`."""
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("splitc rank") and started:
            raise RuntimeError("can't start new thread")
        if thread.name.startswith("splitc rank"):
            started.append(thread)
        START(thread)

    threading.Thread.start = start  # type: ignore[assignment]
    rank.main(descriptor)
