"""Processes that are stopped, as Ctrl-Z does it."""

from __future__ import annotations

import signal

import psutil

from tests.conftest import until


def stop(pid: int) -> None:
    """Stop a process, and wait until it is: before one of its threads has taken the signal, the others work on."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)
