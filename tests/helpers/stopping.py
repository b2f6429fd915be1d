"""Stops processes, as Ctrl-Z does."""

from __future__ import annotations

import signal

import psutil

from tests.conftest import until


def stop(pid: int) -> None:
    """Stop a process, and wait until it is stopped: until one of its threads takes the signal, the others go on."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)
