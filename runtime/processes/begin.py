"""The start of a rank process: its heartbeat, and CUDA's initialization while Python imports the rest.

This imports almost nothing itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import struct
import threading
import time
from typing import NoReturn

from splitc.runtime.ipc.mapped_files import NCCL, find_mapped, remove_files

# Seconds between two heartbeats. A choice: 16 are missing before a rank is said to hang (remote.PATIENCE).
BEAT = 0.5


def begin(control: int, pulse: int, parent: int, starts_cuda: bool) -> None:
    """Start the process of a device's ranks, whose main program follows on this thread.

    - `control`: the descriptor of the socket to the caller's process.
    - `parent`: the caller's process number.
    - `pulse`: the descriptor of memory for the time of the last heartbeat, by time.monotonic.
    """
    print_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the caller handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the caller had blocked until here
    threading.Thread(target=_show_life, args=(control, pulse, parent), name="splitc pulse", daemon=True).start()
    if starts_cuda:
        threading.Thread(target=_make_context, name="splitc starts CUDA", daemon=True).start()


def print_to_stderr() -> None:
    """Redirect what libraries print, such as NCCL's messages, to stderr: stdout is for the caller's results."""
    with contextlib.suppress(OSError):  # the caller has no stderr
        os.dup2(2, 1)


def _show_life(control: int, pulse: int, parent: int) -> None:
    """Write the heartbeat, and end this process when the caller's process has ended."""
    times = mmap.mmap(pulse, os.fstat(pulse).st_size)
    os.close(pulse)
    hangup = select.poll()
    hangup.register(control, select.POLLHUP)  # which is always reported, and nothing else
    while True:
        struct.pack_into("d", times, 0, time.monotonic())
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in hangup.poll(1e3 * BEAT)):
            break
        if os.getppid() != parent:  # a copy of the caller may still hold the other end of the socket
            break
    end_at_once()


def end_at_once() -> NoReturn:
    """End this process silently, since the caller's has ended, and remove NCCL's files."""
    remove_files(find_mapped(os.getpid(), NCCL))
    os._exit(1)


def _make_context() -> None:
    """Create the context of the first GPU. A missing driver or GPU is reported later, when it is used."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)  # for the life of the process
